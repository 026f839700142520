"""`make bench-methods`: SFT, DPO, KTO and GRPO of both backends on three seeds, once with flipped
gradients. `tests/support/methods.py` has the task and the settings."""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from dataclasses import asdict
from itertools import product
from pathlib import Path

from rich.console import Console

from benchmarks import record
from benchmarks.trl_grpo import trl_versions
from tests.support import methods


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.methods", description=__doc__)
    parser.add_argument("--backends", nargs="+", default=methods.BACKENDS)
    parser.add_argument("--methods", nargs="+", default=methods.METHODS)
    parser.add_argument("--seeds", nargs="+", type=int, default=methods.SEEDS)
    parser.add_argument("--no-save", action="store_true", help="only print")
    asked = parser.parse_args()
    console, rows, load = Console(), [], os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder, methods.trainings(Path(folder)) as trainings:
        for backend, method, flipped, seed in product(
            asked.backends, asked.methods, (False, True), asked.seeds
        ):
            began = time.monotonic()
            outcome = trainings.run(backend, method, seed, flipped=flipped)
            rows.append(
                {
                    "backend": backend,
                    "flipped": flipped,
                    "seed": seed,
                    **asdict(outcome),
                    "has_learned": outcome.has_learned,
                    "seconds": round(time.monotonic() - began, 1),
                }
            )
            console.print(
                f"{backend} {method}, seed {seed}{', flipped' * flipped}: {outcome.first:.3f} to "
                f"{outcome.last:.3f}, {'learned' if outcome.has_learned else 'not learned'}"
            )
    settings = {
        "steps": methods.STEPS,
        "learning_rates": methods.LEARNING_RATES,
        "beta": methods.BETA,
        "processes": {"fsdp2": 1, "trl": 2},
        "load": [load, os.getloadavg()[0]],
        "trl": trl_versions(),
    }
    if not asked.no_save:
        found = {"machine": record.machine(), "settings": settings, "trainings": rows}
        console.print(f"written to {record.save(found)}")


if __name__ == "__main__":
    main()
