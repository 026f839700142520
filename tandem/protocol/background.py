"""Background work that leaves the processors to other processes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

_AUTOGROUP = Path("/proc/self/autogroup")
_RETRY_SECONDS = 0.05
_MOST_TRIES = 200


def in_background(work: Callable[[], None], *, nice: int) -> None:
    """Run `work` with additional niceness, and return at its end.

    With 15, the work gets a thirtieth of a contested core. It has its own thread, because a thread
    cannot lower its niceness without privileges. Threads that it starts stay nice."""
    if not nice:
        work()
        return
    # `os.nice` affects only the calling thread.
    with (
        _nice_session(nice),
        ThreadPoolExecutor(1, initializer=os.nice, initargs=(nice,)) as thread,
    ):
        thread.submit(work).result()


def make_nicer(pid: int, *, by: int) -> None:
    """Make a new session's leader and its future children nicer. Raises `OSError`."""
    nice = min(19, os.getpriority(os.PRIO_PROCESS, 0) + by)
    os.setpriority(os.PRIO_PROCESS, pid, nice)
    if (autogroup := Path(f"/proc/{pid}/autogroup")).exists():
        autogroup.write_text(str(nice))


@contextmanager
def _nice_session(nice: int) -> Iterator[None]:
    """Make this process's session nicer during the block, if the process leads it.

    A kernel with autogroups (sched(7)) divides processors between sessions first."""
    if not _AUTOGROUP.exists() or os.getsid(0) != os.getpid():
        yield
        return
    before = int(_AUTOGROUP.read_text().rpartition(" ")[2])
    _set_autogroup(min(19, before + nice))
    try:
        yield
    finally:
        _set_autogroup(before)


def _set_autogroup(nice: int) -> None:
    """Set the session's niceness. The kernel accepts ten changes a second from all users, so retry.
    Raises `OSError`."""
    for _ in range(_MOST_TRIES):
        try:
            _AUTOGROUP.write_text(str(nice))
        except BlockingIOError:
            time.sleep(_RETRY_SECONDS)
        else:
            return
    raise TimeoutError("the kernel did not take a new niceness of the session")
