"""Where the agent of a data directory is called: at a Unix socket in it."""

from __future__ import annotations

import os
from pathlib import Path

_LONGEST_SOCKET_PATH = 100
"""Bytes. The kernel takes 107, and 103 outside Linux."""


def agent_address(data_dir: Path) -> str:
    """Return the gRPC address of the data directory's agent.

    The path of a socket must be short. That of a long directory goes through a descriptor of it,
    which stays open for the life of the process.
    """
    path = socket_path(data_dir.absolute())
    if len(os.fsencode(path)) <= _LONGEST_SOCKET_PATH:
        return f"unix:{path}"
    fd = os.open(data_dir, os.O_RDONLY | os.O_DIRECTORY)
    return f"unix:{socket_path(Path(f'/proc/self/fd/{fd}'))}"


def socket_path(data_dir: Path) -> Path:
    return data_dir / "agent.sock"
