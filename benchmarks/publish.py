"""Publishing, from the trainer's memory to a serving engine."""

from __future__ import annotations

import os
import statistics
import time
from pathlib import Path

import tinker

from benchmarks.bursts import DirectEngine
from tandem.demo.tiny_model import TinyShape

SHAPES = {
    "1 M": TinyShape(),
    "100 M": TinyShape(hidden=768, layers=11, ffn=3072, heads=12, head_dim=64),
}


def publish_to_served(
    client: tinker.TrainingClient, *, model: Path, engine: DirectEngine, rounds: int
) -> dict[str, object]:
    """Return medians over `rounds` publishes of one model, after two for warm-up.

    Ratios are to the unavoidable work: writing the bytes once, and the engine's own load."""
    content = (model / "model.safetensors").read_bytes()
    served, written, loaded = [], [], []
    for number in range(rounds + 2):
        started = time.perf_counter()
        client.save_weights_and_get_sampling_client().result()
        seconds = time.perf_counter() - started
        wrote, load = _write(content, model / "once"), engine.reload(model)
        if number > 1:
            served.append(seconds)
            written.append(wrote)
            loaded.append(load)
    floors = [sum(each) for each in zip(written, loaded, strict=True)]
    ratios = [ours / floor for ours, floor in zip(served, floors, strict=True)]
    return {
        "bytes": len(content),
        "publish_to_served_seconds": round(statistics.median(served), 4),
        "written_once_seconds": round(statistics.median(written), 4),
        "engine_load_seconds": round(statistics.median(loaded), 4),
        "× both": round(statistics.median(ratios), 2),
    }


def adapter_to_served(
    client: tinker.TrainingClient, *, weights: Path, rounds: int
) -> dict[str, object]:
    """Return medians over `rounds` publishes of an adapter, after two for warm-up.

    Versions are published in `weights`."""
    seconds = []
    for _ in range(rounds + 2):
        started = time.perf_counter()
        client.save_weights_and_get_sampling_client().result()
        seconds.append(time.perf_counter() - started)
    (*_, newest) = sorted(weights.glob("*/v*/adapter_model.safetensors"))
    return {
        "rank": 32,
        "bytes": newest.stat().st_size,
        "publish_to_served_seconds": round(statistics.median(seconds[2:]), 4),
    }


def _write(content: bytes, target: Path) -> float:
    """Return the seconds to write a file durably."""
    started = time.perf_counter()
    with target.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    seconds = time.perf_counter() - started
    target.unlink()
    return seconds
