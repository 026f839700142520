"""Publishing, from the trainer's memory to a serving engine.

`python -m benchmarks.publish OTHER` publishes from this checkout and another one in turn."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import tinker

from benchmarks import record
from benchmarks.bursts import DirectEngine, direct_engine
from benchmarks.versus import HERE, commit_of, probe
from tandem.demo.tiny_model import TinyShape, write_tiny_model

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


def beside(other: Path, model: Path, *, pairs: int, seconds: float) -> dict[str, object]:
    """Return medians of at most `pairs` publishes of each checkout, begun within these seconds.

    In each pair, both checkouts publish in turn, then come the unavoidable parts."""
    content, name = (model / "model.safetensors").read_bytes(), "publish_to_served_seconds"
    with (
        direct_engine(model) as engine,
        probe(HERE.parent, model) as ours,
        probe(other, model) as theirs,
    ):
        for running in (ours, theirs, ours, theirs):  # warm-up
            running.ask(name)
        found: list[dict[str, float]] = []
        began = time.monotonic()
        while len(found) < pairs and (len(found) < 3 or time.monotonic() - began < seconds):
            order = {"here": ours, "other": theirs}
            names = list(order) if len(found) % 2 else list(order)[::-1]
            row = {each: order[each].ask(name) for each in names}
            row["written once"] = _write(content, model / "once")
            row["engine's load"] = engine.reload(model)
            found.append(row)
            print({key: round(value, 3) for key, value in row.items()}, flush=True)
    both = [row["written once"] + row["engine's load"] for row in found]
    ratios = {
        "here / other": [row["here"] / row["other"] for row in found],
        "here / both": [row["here"] / floor for row, floor in zip(found, both, strict=True)],
        "other / both": [row["other"] / floor for row, floor in zip(found, both, strict=True)],
    }
    return {
        "bytes": len(content),
        "pairs": len(found),
        "seconds": {key: _median([row[key] for row in found]) for key in found[0]},
        "ratios": {key: _median(values) for key, values in ratios.items()},
        "range of here / other": [round(f(ratios["here / other"]), 3) for f in (min, max)],
    }


def _median(values: list[float]) -> float:
    return round(statistics.median(values), 4)


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.publish", description=__doc__)
    parser.add_argument("other", type=Path, help="a checkout of another commit")
    parser.add_argument("--size", choices=list(SHAPES), default="100 M")
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=90.0)
    asked = parser.parse_args()
    load, other = os.getloadavg()[0], asked.other.resolve()
    with tempfile.TemporaryDirectory() as work:
        model = Path(work) / "model"
        write_tiny_model(model, seed=0, shape=SHAPES[asked.size])
        row = beside(other, model, pairs=asked.pairs, seconds=asked.seconds)
    found = {
        "machine": record.machine(),
        "here": commit_of(HERE.parent),
        "other": commit_of(other),
        "load": [round(load, 2), round(os.getloadavg()[0], 2)],
        "publish": {"parameters": asked.size, **row},
    }
    print(json.dumps(found["publish"]), record.save(found).name)


if __name__ == "__main__":
    main()
