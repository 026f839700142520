"""TRL jobs, started as their worker starts them: by torchrun, with `PET_*`, in `.venv/trl`."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tandem.backends.frameworks import own_environment
from tandem.backends.jobs import JobPaths
from tandem.backends.registry import job_backend
from tandem.backends.rendering import configure, render_job
from tandem.demo.tiny_model import TinyShape, write_tiny_model

ROOT = Path(__file__).parents[2]
PYTHON = own_environment("trl") / "bin" / "python"
needs_trl = pytest.mark.skipif(not PYTHON.exists(), reason="make setup-trl has not run")

SHAPE = TinyShape(hidden=32, layers=2, ffn=64, heads=2, head_dim=16, vocabulary=2048)
NUMBERS = range(32)
MESSAGES = [
    {
        "messages": [
            {"role": "user", "content": f"Say {number}"},
            {"role": "assistant", "content": str(number)},
        ]
    }
    for number in NUMBERS
]
DATA: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "sft": [{"prompt": f"Say {n}: ", "completion": str(n)} for n in NUMBERS],
    "dpo": [{"prompt": f"Say {n}: ", "chosen": "1", "rejected": "2"} for n in NUMBERS],
    "kto": [{"prompt": "Say: ", "completion": "12"[n % 2], "label": n % 2 == 0} for n in NUMBERS],
    "grpo": [{"prompt": f"Say {n}: ", "answer": "1"} for n in NUMBERS],
}


def write_model(path: Path, *, seed: int = 0) -> Path:
    write_tiny_model(path, seed=seed, shape=SHAPE, tokenizer="qwen")
    return path


@dataclass(frozen=True)
class TrlJob:
    """The files of a job. `start` begins an attempt."""

    folder: Path
    model: Path
    processes: int = 2

    def write_data(
        self, train: Sequence[Mapping[str, Any]], held_out: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        (self.folder / "data").mkdir(parents=True)
        for name, rows in (("train", train), ("eval", held_out)):
            if rows:
                lines = "".join(json.dumps(row) + "\n" for row in rows)
                (self.folder / "data" / f"{name}.jsonl").write_text(lines)

    def start(
        self, values: Mapping[str, object], *, attempt: int = 1, wrapper: Sequence[str] = ()
    ) -> subprocess.Popen[str]:
        """Start torchrun. `wrapper` replaces the program, and gets it as its first argument."""
        backend = job_backend("trl")
        configuration = configure(backend, values)
        job = {
            "configuration": configuration.model_dump(mode="json"),
            "model": str(self.model),
            "folder": str(self.folder),
            "attempt": attempt,
            "processes": self.processes,
        }
        (self.folder / "job.json").write_text(json.dumps(job))
        paths = JobPaths(
            python=str(PYTHON),
            program=str(ROOT / "trainer_service" / "jobs" / "trl"),
            folder=str(self.folder),
            model=str(self.model),
        )
        spec = render_job(backend, configuration, paths, self.processes)
        argv = [*configuration.command(paths), *wrapper, *configuration.args(paths)]
        return subprocess.Popen(
            argv,
            env=self.environment(spec.environment),
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def environment(self, more: Mapping[str, str]) -> dict[str, str]:
        return {
            **os.environ,
            **more,
            "OMP_NUM_THREADS": "1",
            "PET_NNODES": "1",
            "PET_NPROC_PER_NODE": str(self.processes),
            "PET_STANDALONE": "1",
            "PET_LOCAL_ADDR": "127.0.0.1",
        }

    def run(self, values: Mapping[str, object], **more: Any) -> None:
        with self.start(values, **more) as process:
            try:
                output, _none = process.communicate(timeout=300)
            finally:
                process.kill()
        assert process.returncode == 0, output

    def lines(self, name: str, attempt: int = 1) -> list[dict[str, Any]]:
        """Return the whole lines of an attempt's file."""
        path = self.folder / f"attempt-{attempt}" / f"{name}.jsonl"
        content = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in content.splitlines(True) if line.endswith("\n")]

    def values(self, name: str, attempt: int = 1) -> list[float]:
        """Return a metric's values, in the order of steps."""
        found = [line["values"] for line in self.lines("metrics", attempt)]
        return [values[name] for values in found if name in values]

    def result(self) -> dict[str, torch.Tensor]:
        return load_file(next((self.folder / "result").glob("*.safetensors")))
