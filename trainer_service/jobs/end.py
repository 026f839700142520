"""The end of an attempt: its reason, and its file."""

from __future__ import annotations

import json
import re
import secrets
import signal
from contextlib import suppress
from itertools import takewhile
from pathlib import Path

from tandem.backends.jobs import JobEnd
from tandem.errors import without_paths
from tandem.weights.store import fsync_path, write_synced

_FILE = "end.json"
_ROOT_CAUSE = re.compile(r"Root Cause.*?rank\s*:\s*(\d+).*?exitcode\s*:\s*(-?\d+)", re.DOTALL)
"""In torchrun's report about its ranks: the first failed one, and its exit status."""
_OF_TORCHRUN = re.compile(r"[EWI]\d{4} .*torch/distributed/")
"""A line of torchrun's own log."""
_FAILED = "failed (exitcode: "
"""Begins torchrun's report, which ends the log."""
_LINES = 5
_LONGEST_REASON = 2000


def write_end(folder: Path, end: JobEnd) -> None:
    """Write the file so that it has its name only when it is whole and durable. Raises
    `OSError`."""
    partial = folder / f".{_FILE}-{secrets.token_hex(4)}"
    try:
        write_synced(partial, end.model_dump_json().encode())
        partial.replace(folder / _FILE)
    except OSError:
        with suppress(OSError):
            partial.unlink()
        raise
    fsync_path(folder)


def reason_of(status: int, *, error_file: Path, output: str) -> str:
    """Return why torchrun ended with a status other than 0, without paths.

    `error_file` has the error that a rank recorded, if any. `output` is the end of the log."""
    found = _ROOT_CAUSE.search(output)
    program, status = (f"rank {found[1]}", int(found[2])) if found else ("torchrun", status)
    detail = _recorded(error_file) or _last_lines(output)
    how = f"{program} {_described(status)}"
    return without_paths(f"{how}: {detail}" if detail else how)[:_LONGEST_REASON]


def _described(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    name = next((each.name for each in signal.Signals if each == -status), f"signal {-status}")
    return f"was killed by {name}"


def _recorded(error_file: Path) -> str:
    """Return the message in a file of torch elastic, or ""."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        message = json.loads(error_file.read_text())["message"]
        return str(message["message"] if isinstance(message, dict) else message)
    return ""


def _last_lines(output: str) -> str:
    """Return the last lines before torchrun's own report."""
    lines = [line.strip() for line in re.split(r"[\r\n]", output)]
    before = takewhile(lambda line: _FAILED not in line, lines)
    ours = [line for line in before if line and not _OF_TORCHRUN.match(line)]
    return " | ".join(ours[-_LINES:])
