"""Waits for several tasks, whose error is a single one."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

Result = TypeVar("Result")


async def all_of(waits: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Await all together. The first error cancels the others, and is raised."""
    try:
        async with asyncio.TaskGroup() as tasks:
            started = [tasks.create_task(wait) for wait in waits]
    except BaseExceptionGroup as errors:
        raise first_error(errors) from None
    return [task.result() for task in started]


def first_error(error: BaseException) -> BaseException:
    """Return the first single error of nested groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
