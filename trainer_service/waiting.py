"""Waiting for whichever of several things comes first."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable


async def first_of(*awaitables: Awaitable[object], timeout: float | None = None) -> None:
    """Returns when one is done, or after `timeout` seconds; cancels none and raises nothing."""
    futures = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    await asyncio.wait(futures, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
