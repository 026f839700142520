"""A program in the place of cuda-checkpoint, and the states of its processes."""

from __future__ import annotations

from pathlib import Path

from tandem.agent.suspender import CudaCheckpoint

# Imitates the used parts of cuda-checkpoint. The file "7" has the state of process 7. A file "fail
# lock 7" makes its lock fail, "hang lock 7" makes it hang, and "deaf lock 7" makes it do nothing.
PROGRAM = """#!/bin/sh
folder=$(dirname "$0")
for pid; do :; done
state=$(cat "$folder/$pid" 2>/dev/null) || { echo "no CUDA in $pid" >&2; exit 1; }
echo "$*" >> "$folder/calls"
[ "$1" = --get-state ] && { echo "$state"; exit; }
[ -e "$folder/fail $2 $pid" ] && { echo failed > "$folder/$pid"; echo "not supported" >&2; exit 1; }
[ -e "$folder/hang $2 $pid" ] && exec sleep 600
[ -e "$folder/deaf $2 $pid" ] && exit
case "$2 $state" in
  "lock running") echo locked ;;
  "checkpoint locked") echo checkpointed ;;
  "restore checkpointed") echo locked ;;
  "unlock locked") echo running ;;
  *) echo "cannot $2 what is $state" >&2; exit 1 ;;
esac > "$folder/$pid"
"""


class Machine:
    """Processes and their states, for the program."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.program = folder / "cuda-checkpoint"
        self.program.write_text(PROGRAM)
        self.program.chmod(0o700)
        self.suspender = CudaCheckpoint(find_program=self._find, driver=lambda: "580.95.05")

    def _find(self, name: str) -> str | None:
        return str(self.folder / name) if (self.folder / name).exists() else None

    def add(self, *pids: int) -> None:
        for pid in pids:
            (self.folder / str(pid)).write_text("running\n")

    def on(self, what: str) -> Path:
        path = self.folder / what
        path.touch()
        return path

    def states(self, *pids: int) -> list[str]:
        return [(self.folder / str(pid)).read_text().strip() for pid in pids]

    def calls(self) -> list[str]:
        return (self.folder / "calls").read_text().splitlines()
