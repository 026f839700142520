"""Waits for a condition instead of a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

from tandem.protocol.worker import WorkerHandle
from tandem.protocol.worker_health import wait_until_serving

T = TypeVar("T")

PATIENCE = 120.0
"""Seconds until a test gives up. Nothing is measured with it."""


def wait_until(
    condition: Callable[[], T], *, what: str = "the condition holds", timeout: float = PATIENCE
) -> T:
    """Return the first truthy value of `condition`. Fails if none comes in time."""
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {timeout:g} s in vain until {what}"
        time.sleep(0.02)
    return value


async def until(
    condition: Callable[[], T], *, what: str = "the condition holds", timeout: float = PATIENCE
) -> T:
    """Wait like `wait_until`, in a running event loop."""
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {timeout:g} s in vain until {what}"
        await asyncio.sleep(0.001)
    return value


async def until_serving(handle: WorkerHandle) -> None:
    assert await wait_until_serving(handle, timeout=PATIENCE) == ""
