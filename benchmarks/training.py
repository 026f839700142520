"""forward_backward through Tandem, beside plain transformers loops, eager and compiled, in turn."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import perf_counter

import tinker
from tinker import types

from benchmarks.in_turn import asked, floor_environment
from benchmarks.rl_step import busy_seconds
from benchmarks.training_batches import BATCHES, WAYS, batch, targets
from tandem.stack import Stack

PLAIN, COMPILED = "plain", "compiled"
Way = Callable[[str], tuple[float, float]]
"""Computes the batch of this name. Returns wall seconds and the trainer's processor seconds."""
_WARM_UP = 2


@contextmanager
def floors(model: Path) -> Iterator[dict[str, Way]]:
    """The loops: one thread or two, batches whole or in parts, eager or compiled.

    Compiled loops compile at their first request, one after the other."""
    made: dict[str, Way] = {}
    with ExitStack() as opened:
        for kind in (PLAIN, COMPILED):
            for count in (1, 2):
                arguments = (str(model), str(count), *([COMPILED] if kind == COMPILED else []))
                environment = floor_environment(threads=count)
                started = asked("benchmarks.plain_training", *arguments, environment=environment)
                ask, _ = opened.enter_context(started)
                for way in WAYS:

                    def once(name: str, ask: Callable = ask, way: str = way) -> tuple[float, float]:
                        return tuple(ask([name, way]))

                    made[f"{kind}, {way}, {count} thread(s)"] = once
        yield made


def through_tandem(stack: Stack, client: tinker.TrainingClient) -> Way:
    data = {name: [_datum(sequence) for sequence in batch(name)] for name in BATCHES}

    def once(name: str) -> tuple[float, float]:
        before, began = busy_seconds(stack)["trainer CPU"], perf_counter()
        client.forward_backward(data[name], "cross_entropy").result()
        seconds = perf_counter() - began
        busy = busy_seconds(stack)["trainer CPU"] - before
        client.optim_step(types.AdamParams(learning_rate=0.0)).result()
        return seconds, busy

    return once


def _datum(sequence: list[int]) -> types.Datum:
    return types.Datum(
        model_input=types.ModelInput.from_ints(sequence[:-1]),
        loss_fn_inputs={
            "target_tokens": types.TensorData(
                data=sequence[1:], dtype="int64", shape=[len(sequence) - 1]
            )
        },
    )


def compare(ways: dict[str, Way], *, rounds: int) -> list[dict[str, object]]:
    """Return a row for each batch and way, with only the fastest plain and the fastest compiled
    loop.

    Numbers are medians over rounds in which each way had its turn, after two that do not count."""
    rows: list[dict[str, object]] = []
    for name in BATCHES:
        found: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
        for number in range(rounds + _WARM_UP):
            for way, once in ways.items():
                measured = once(name)
                if number >= _WARM_UP:
                    found[way].append(measured)
        best = {
            kind: min(
                (way for way in ways if way.startswith(f"{kind},")),
                key=lambda way: statistics.median(seconds for seconds, _ in found[way]),
            )
            for kind in (PLAIN, COMPILED)
        }
        ours = [way for way in ways if not way.startswith((f"{PLAIN},", f"{COMPILED},"))]
        tokens = targets(batch(name))
        for way in (*best.values(), *ours):
            rows.append(
                {
                    "batch": name,
                    "way": way,
                    "tokens/s": round(tokens / statistics.median(s for s, _ in found[way])),
                    "× plain": _ratio(found[best[PLAIN]], found[way], 0),
                    "× compiled": _ratio(found[best[COMPILED]], found[way], 0),
                    "processor s": round(statistics.median(busy for _, busy in found[way]), 3),
                    "× compiled, by processor": _ratio(found[best[COMPILED]], found[way], 1),
                }
            )
    return rows


def _ratio(floor: list[tuple[float, float]], ours: list[tuple[float, float]], which: int) -> float:
    pairs = zip(floor, ours, strict=True)
    return round(statistics.median(theirs[which] / mine[which] for theirs, mine in pairs), 3)
