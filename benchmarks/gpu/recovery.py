"""The pause of a run whose trainer is killed, and the pause of a snapshot.

All parameters are trained on a whole stack, with an idle process for the next trainer."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.gpu.workers import Bench

_STEPS, _KILLS = 4, 2
_STEPS_ON_CORES, _KILLS_ON_CORES = 2, 1


def recovery(bench: Bench, size: str, model: Path) -> dict[str, object]:
    from benchmarks.recovery import measure  # needs the SDK

    bench.say(f"{size}: a trainer is killed")
    on_gpu = bench.gpu is not None
    found = measure(
        model,
        bench.work / "recovery",
        suffix=":full",
        steps=_STEPS if on_gpu else _STEPS_ON_CORES,
        kills=_KILLS if on_gpu else _KILLS_ON_CORES,
        pool=1,
    )
    bench.say(json.dumps(found))
    return found
