"""Calls methods in their variants, and records them."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import tinker
from tinker.lib.public_interfaces.rest_client import RestClient

from tests.conformance.conform.surface import client_class, public_methods
from tests.support.plain_http import PlainClient, message
from tests.support.sdk import Refusal, refusal_of
from tests.support.stacks import TestStack

PATIENCE = 240.0
"""Seconds for a call's result. A worker may have to start on a busy machine."""


@dataclass(frozen=True)
class Call:
    """Runs a method or its `_async` twin to its result."""

    variant: str

    def __call__(self, client: object, method: str, /, *arguments: object, **settings: object):
        if self.variant == "sync":
            return settled(getattr(client, method)(*arguments, **settings))
        return asyncio.run(_awaited(getattr(client, f"{method}_async"), arguments, settings))


VARIANTS = (Call("sync"), Call("async"))


async def _awaited(method: Callable, arguments: tuple, settings: dict):
    async with asyncio.timeout(PATIENCE):
        result = await method(*arguments, **settings)
        # Some return a result, some an APIFuture to await.
        return await result if hasattr(result, "result_async") else result


def settled(result):
    """The result itself, or the future's."""
    return result.result(timeout=PATIENCE) if hasattr(result, "result") else result


@contextmanager
def service_client(**settings: object) -> Iterator[tinker.ServiceClient]:
    """A session for the block. Older releases know fewer settings, and no `with`."""
    known = inspect.signature(tinker.ServiceClient).parameters
    client = tinker.ServiceClient(**{n: value for n, value in settings.items() if n in known})
    try:
        yield client
    finally:
        settled(client.close("success"))


def rest_client() -> RestClient:
    """Older releases make a RestClient with a ServiceClient."""
    if hasattr(tinker, "RestClient"):
        return tinker.RestClient()
    return tinker.ServiceClient().create_rest_client()


def refused_training(stack: TestStack, run_id: str) -> Refusal:
    """Why a run takes no forward_backward. The SDK makes no client for it."""
    plain = PlainClient(stack.stack.endpoint)
    answer = plain.forward_backward(message(run_id, 1, [3, 4, 5]))
    return refusal_of(answer) if answer.is_error else plain.failure(answer.json()["request_id"])


def record_calls() -> set[str]:
    """Wraps every public method. Each call adds its method to the returned set.

    It finds claims about methods that their test never calls."""
    called: set[str] = set()
    for method in public_methods():
        owner = client_class(method.owner)
        assert owner is not None
        member = vars(owner)[method.name]
        static = isinstance(member, staticmethod)
        function = member.__func__ if static else member
        recorded = _recorded(function, path=method.path, called=called)
        setattr(owner, method.name, staticmethod(recorded) if static else recorded)
    return called


def _recorded(function: Callable, *, path: str, called: set[str]) -> Callable:
    @functools.wraps(function)
    def wrapper(*arguments, **settings):
        called.add(path)
        return function(*arguments, **settings)

    return wrapper
