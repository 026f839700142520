"""Work that leaves the processors to others."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

_AUTOGROUP = Path("/proc/self/autogroup")
_RETRY_SECONDS = 0.05
_MOST_TRIES = 200


def in_background(work: Callable[[], None], *, nice: int) -> None:
    """Do the work with so much more niceness, and return when it is done (Linux; elsewhere with the
    usual one). It counts towards all other processes: of a core that somebody else wants, 15 leaves
    the work a thirtieth.

    Without privileges no thread can be less nice again, so the work has a thread of its own, which
    ends with it. A thread that the work starts and leaves stays as nice.
    """
    if sys.platform != "linux" or not nice:
        work()
        return
    # `os.nice` is for the thread that calls it.
    with (
        _nice_session(nice),
        ThreadPoolExecutor(1, initializer=os.nice, initargs=(nice,)) as thread,
    ):
        thread.submit(work).result()


def make_nicer(pid: int, *, by: int) -> None:
    """Make the leader of a new session, its future children and its session nicer than this
    process. Raises `OSError`."""
    nice = min(19, os.getpriority(os.PRIO_PROCESS, 0) + by)
    os.setpriority(os.PRIO_PROCESS, pid, nice)
    if (autogroup := Path(f"/proc/{pid}/autogroup")).exists():
        autogroup.write_text(str(nice))


@contextmanager
def _nice_session(nice: int) -> Iterator[None]:
    """Make this process's session nicer, if it leads one, for as long as this lasts.

    A kernel with autogroups (sched(7)) divides the processors between sessions first, so that the
    niceness of a thread counts only within its own.
    """
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
    """Try again while the kernel refuses: it takes ten changes a second from users, all together.

    Raises `OSError`.
    """
    for _ in range(_MOST_TRIES):
        try:
            _AUTOGROUP.write_text(str(nice))
        except BlockingIOError:
            time.sleep(_RETRY_SECONDS)
        else:
            return
    raise TimeoutError("the kernel did not take a new niceness of the session")
