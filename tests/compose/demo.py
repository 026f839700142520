"""The demo against the stack, from outside, and its results for comparison."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.compose.engine import ENVIRONMENT, ROOT, inside

_DEADLINE = 900.0


class Demo:
    """A running demo. Demos in one folder start from one warm-up, which the first one makes."""

    def __init__(self, folder: Path, name: str, *, command: Sequence[str], key: str) -> None:
        self.out = folder / name
        options = ("--out", str(self.out), "--data-dir", str(folder / "data"), "--save", "trained")
        self._log = folder / f"{name}.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                (*command, *options),
                cwd=ROOT,
                stdout=log,
                stderr=log,
                env={**ENVIRONMENT, "TINKER_API_KEY": key},
            )

    def runs(self) -> bool:
        return self._process.poll() is None

    def steps(self) -> list[dict[str, float]]:
        file = self.out / "metrics.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def reached(self, step: int) -> bool:
        """Return whether it has done so many steps or has ended."""
        return len(self.steps()) >= step or not self.runs()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def finish(self) -> str:
        """Return the path of its weights, after its success."""
        assert self._process.wait(timeout=_DEADLINE) == 0, self._log.read_text()
        return str(json.loads((self.out / "summary.json").read_text())["saved"])

    def results(self) -> list[tuple[float, float]]:
        return [(step["reward_mean"], step["loss"]) for step in self.steps()]


def checksums(path: str, *, copy: str) -> str:
    """Return the checksums of a checkpoint's weights, exported to `copy` in the container."""
    inside("gateway", "tandem", "checkpoints", "export", path, copy)
    found = inside("gateway", "sh", "-c", f"cd {copy} && sha256sum *.safetensors")
    assert "model" in found or "adapter" in found, found
    return found
