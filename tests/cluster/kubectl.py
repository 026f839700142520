"""kubectl in a namespace, with a deadline."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass

_SECONDS = 60.0


@dataclass(frozen=True)
class Kubectl:
    namespace: str

    def __call__(self, *arguments: str, given: bytes = b"", seconds: float = _SECONDS) -> str:
        """Return the output. Raises `AssertionError` with the error output after a failure."""
        done = self.run(*arguments, given=given, seconds=seconds)
        said = done.stderr.decode(errors="replace")
        assert done.returncode == 0, f"kubectl {' '.join(arguments)}: {said}"
        return done.stdout.decode(errors="replace")

    def run(
        self, *arguments: str, given: bytes = b"", seconds: float = _SECONDS
    ) -> subprocess.CompletedProcess[bytes]:
        command = ("kubectl", "--namespace", self.namespace, *arguments)
        return subprocess.run(
            command, input=given, capture_output=True, timeout=seconds, check=False
        )

    def all(self, kinds: str, selector: str = "") -> list[dict]:
        """Return the objects of these kinds, separated by commas, with these labels."""
        chosen = ("--selector", selector) if selector else ()
        return json.loads(self("get", kinds, *chosen, "--output", "json"))["items"]

    def names(self, kinds: str, selector: str = "") -> list[str]:
        chosen = ("--selector", selector) if selector else ()
        return self("get", kinds, *chosen, "--output", "name").split()
