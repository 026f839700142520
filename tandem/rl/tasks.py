"""Runs of coroutines: several together, or one in an event loop of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import wraps
from typing import Any, ParamSpec, TypeVar

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def blocking(
    function: Callable[Parameters, Coroutine[Any, Any, Result]],
) -> Callable[Parameters, Result]:
    """Return `NAME` for a coroutine function `NAME_async`. It runs an event loop of its own."""

    @wraps(function)
    def run(*arguments: Parameters.args, **options: Parameters.kwargs) -> Result:
        return asyncio.run(function(*arguments, **options))

    run.__name__ = run.__qualname__ = function.__name__.removesuffix("_async")
    return run


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
