from __future__ import annotations

import os
import threading

import pytest

from tandem.protocol.background import in_background


def test_what_is_done_in_the_background_is_nice_and_the_rest_is_not():
    found = []

    def work() -> None:
        found.append((threading.current_thread(), os.getpriority(os.PRIO_PROCESS, 0)))

    before = os.getpriority(os.PRIO_PROCESS, 0)
    in_background(work, nice=15)
    ((thread, nice),) = found
    assert nice == min(19, before + 15)
    assert not thread.is_alive()
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


def test_what_fails_in_the_background_is_raised():
    def work() -> None:
        raise ImportError("no such library")

    with pytest.raises(ImportError, match="no such library"):
        in_background(work, nice=1)
