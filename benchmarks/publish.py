"""Publishing, from the trainer's memory to a serving engine: beside a plain copy."""

from __future__ import annotations

import os
import shutil
import statistics
import time
from pathlib import Path

import tinker

from tandem.demo.tiny_model import TinyShape

SHAPES = {
    "1 M": TinyShape(),
    "100 M": TinyShape(hidden=768, layers=11, ffn=3072, heads=12, head_dim=64),
}


def publish_to_served(
    client: tinker.TrainingClient, *, model: Path, rounds: int
) -> dict[str, object]:
    """Return medians over `rounds` publishes of one model, after two for warm-up."""
    size = (model / "model.safetensors").stat().st_size
    seconds = []
    for _ in range(rounds + 2):
        started = time.perf_counter()
        client.save_weights_and_get_sampling_client().result()
        seconds.append(time.perf_counter() - started)
    copies = [_copy(model / "model.safetensors") for _ in range(rounds)]
    served, copied = statistics.median(seconds[2:]), statistics.median(copies)
    return {
        "bytes": size,
        "publish_to_served_seconds": round(served, 4),
        "publish_to_served_gb_per_second": round(size / served / 1e9, 3),
        "plain_copy_seconds": round(copied, 4),
        "plain_copy_gb_per_second": round(size / copied / 1e9, 3),
    }


def adapter_to_served(
    client: tinker.TrainingClient, *, weights: Path, rounds: int
) -> dict[str, object]:
    """Return medians over `rounds` publishes of an adapter, after two for warm-up.

    `weights` is the directory in which the versions are published.
    """
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


def _copy(source: Path) -> float:
    """Return the seconds to copy the file and make the copy durable."""
    target = source.with_suffix(".copy")
    started = time.perf_counter()
    shutil.copyfile(source, target)
    descriptor = os.open(target, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
    seconds = time.perf_counter() - started
    target.unlink()
    return seconds
