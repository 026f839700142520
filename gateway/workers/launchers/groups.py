"""Process groups: ending one, and knowing that nothing of it runs."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

_POLL_SECONDS = 0.01


def kill_group(pgid: int) -> None:
    """Kills every process of the group; does nothing when there is none."""
    try:
        os.killpg(pgid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):  # macOS answers the latter for zombies
        return


def group_members(pgid: int) -> list[int]:
    """The pids of the group's processes that run. Linux; elsewhere zombies are counted, too,
    and the answer is `[pgid]` for any number of them."""
    try:
        os.killpg(pgid, 0)
    except ProcessLookupError:
        return []
    except PermissionError:  # macOS answers so when only zombies are left
        return []
    if sys.platform != "linux":
        return [pgid]
    members = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            # After the name, which is in parentheses and may hold any character: state, parent
            # and group.
            state, _, group, *_ = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it ended while we looked
            continue
        if int(group) == pgid and state not in "ZX":  # a zombie holds nothing; init reaps it
            members.append(int(entry.name))
    return members


async def group_gone(pgid: int, *, timeout: float) -> bool:
    """Waits until no process of the group runs; false when the time is over before."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout
    while group_members(pgid):
        if loop.time() > deadline:
            return False
        await asyncio.sleep(_POLL_SECONDS)
    return True
