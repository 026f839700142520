"""The agent's address: a Unix socket in its data directory."""

from __future__ import annotations

import os
import re
from pathlib import Path

_PLAIN = re.compile(r"[\w/.~+=@ -]+", re.ASCII)
"""A path that gRPC's addresses can express. They end at a comma, and `%` begins a code."""
_LONGEST_SOCKET_PATH = 100
"""In bytes. The kernel's limit is 107, and 103 outside Linux."""


def agent_address(data_dir: Path) -> str:
    """Return the agent's gRPC address.

    A socket's path must be short and plain. Another directory is reached through a descriptor that
    stays open."""
    path = socket_path(data_dir.absolute())
    if len(os.fsencode(path)) <= _LONGEST_SOCKET_PATH and _PLAIN.fullmatch(str(path)):
        return f"unix:{path}"
    fd = os.open(data_dir, os.O_RDONLY | os.O_DIRECTORY)
    return f"unix:{socket_path(Path(f'/proc/self/fd/{fd}'))}"


def socket_path(data_dir: Path) -> Path:
    return data_dir / "agent.sock"
