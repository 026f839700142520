"""Waiting for a condition instead of for a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

PATIENCE = 120.0
"""Seconds. Only how long a test goes on hoping; nothing is measured with it."""


def wait_until(
    condition: Callable[[], T], *, what: str = "the condition holds", timeout: float = PATIENCE
) -> T:
    """The first truthy value of `condition`; an assertion fails when none comes in time."""
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {timeout:g} s in vain until {what}"
        time.sleep(0.02)
    return value


async def until(
    condition: Callable[[], T], *, what: str = "the condition holds", timeout: float = PATIENCE
) -> T:
    """`wait_until` within an event loop, which goes on meanwhile."""
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {timeout:g} s in vain until {what}"
        await asyncio.sleep(0.001)
    return value
