"""The published `tinker` command, with one process for all commands of a test module.

Starting Python and importing the SDK takes seconds, each time. A process of its own it must be:
the SDK keeps the first client that a process makes without arguments, with the address and the
key of that moment. For another address or key, start another `TinkerCommand`.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout


class TinkerCommand:
    """Use it as a context manager. `environment` is added to that of this process."""

    def __init__(self, **environment: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.gateway.tinker_command"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | environment,
            text=True,
        )

    def __enter__(self) -> TinkerCommand:
        return self

    def __exit__(self, *_error: object) -> None:
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()

    def run(self, *arguments: str, typed: str = "") -> tuple[int, str]:
        """Return the exit status of `tinker ARGUMENTS` and what it wrote."""
        self._process.stdin.write(json.dumps({"arguments": arguments, "typed": typed}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the process of the tinker command has ended"
        ended = json.loads(line)
        return ended["status"], ended["output"]

    def shown(self, *arguments: str, typed: str = "") -> str:
        status, output = self.run(*arguments, typed=typed)
        assert status == 0, output
        return output

    def refused(self, *arguments: str, typed: str = "") -> str:
        status, output = self.run(*arguments, typed=typed)
        assert status != 0, output
        return output

    def answer(self, *arguments: str) -> dict:
        """Return what the command writes as JSON."""
        output = self.shown("-f", "json", *arguments)
        return json.loads(output) if output.strip() else {}


def main() -> None:
    from tinker.cli.__main__ import main as tinker

    for line in sys.stdin:
        task = json.loads(line)
        sys.argv = ["tinker", *task["arguments"]]
        outer, sys.stdin = sys.stdin, io.StringIO(task["typed"])
        output, status = io.StringIO(), 0
        with redirect_stdout(output), redirect_stderr(output):
            try:
                tinker()
            except SystemExit as end:
                status = end.code if isinstance(end.code, int) else int(end.code is not None)
        sys.stdin = outer
        print(json.dumps({"status": status, "output": output.getvalue()}), flush=True)


if __name__ == "__main__":
    main()
