"""forward_backward through Tandem, beside a plain transformers loop over the same batch."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import tinker
from tinker import types

from benchmarks.sampling import run_module
from benchmarks.training_batches import BATCHES, batch, targets


def plain(model: Path, *, rounds: int, compiled: bool = False) -> dict[str, tuple[float, str]]:
    """Return for each batch the best median of tokens per second, and how it was reached."""
    best: dict[str, tuple[float, str]] = {}
    for threads in (1, 2):
        arguments = [str(model), str(threads), str(rounds), *(["compiled"] if compiled else [])]
        answer = run_module("benchmarks.plain_training", *arguments, threads=threads)
        for name, ways in answer.items():  # type: ignore[attr-defined]
            for way, speeds in ways.items():
                found = (statistics.median(speeds), f"{way}, {threads} thread(s)")
                best[name] = max(best.get(name, (0.0, "")), found)
    return best


def through_tandem(client: tinker.TrainingClient, *, rounds: int) -> dict[str, float]:
    """Return median tokens per second of requests in turn, after two for warm-up."""
    medians = {}
    for name in BATCHES:
        sequences = batch(name)
        data = [_datum(sequence) for sequence in sequences]
        speeds = []
        for _ in range(rounds + 2):
            started = time.perf_counter()
            client.forward_backward(data, "cross_entropy").result()
            speeds.append(targets(sequences) / (time.perf_counter() - started))
        client.optim_step(types.AdamParams(learning_rate=0.0)).result()
        medians[name] = statistics.median(speeds[2:])
    return medians


def _datum(sequence: list[int]) -> types.Datum:
    return types.Datum(
        model_input=types.ModelInput.from_ints(sequence[:-1]),
        loss_fn_inputs={
            "target_tokens": types.TensorData(
                data=sequence[1:], dtype="int64", shape=[len(sequence) - 1]
            )
        },
    )


def compare(
    floor: dict[str, tuple[float, str]],
    compiled: dict[str, tuple[float, str]],
    ours: dict[str, dict[str, float]],
) -> list[dict[str, object]]:
    """Return a row for each batch; `ours` is by column, such as "1 rank"."""
    rows = []
    for name in BATCHES:
        best, way = floor[name]
        compiled_best, compiled_way = compiled[name]
        row: dict[str, object] = {
            "batch": name,
            "plain tokens/s": round(best),
            "plain loop": way,
            "compiled tokens/s": round(compiled_best),
            "compiled loop": compiled_way,
        }
        for column, speeds in ours.items():
            row[f"{column} tokens/s"] = round(speeds[name])
            row[f"{column} ratio"] = round(speeds[name] / best, 3)
            row[f"{column} to compiled"] = round(speeds[name] / compiled_best, 3)
        rows.append(row)
    return rows
