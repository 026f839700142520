"""What a client is told when something is refused or has failed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import httpx
import pytest
import tinker

TIMEOUT = 30.0
"""Seconds within which a refusal must come: far less than the SDK's five minutes of retries."""


@dataclass(frozen=True)
class Refusal:
    """`status` is that of HTTP, or 200 for an accepted operation that failed."""

    type: str
    message: str
    category: str
    status: int


def refusal(action: Callable[[], object]) -> Refusal:
    """Runs something of the SDK that must raise, and says what the client learned."""
    with pytest.raises((tinker.RequestFailedError, tinker.APIStatusError)) as caught:
        action()
    error = caught.value
    if isinstance(error, tinker.RequestFailedError):
        # The SDK's own words come first; the sentence of the server is "type: what was wrong".
        type_, _, message = error.message.partition("Request failed: ")[2].partition(": ")
        return Refusal(type=type_, message=message, category=str(error.category), status=200)
    return refusal_of(error.response)


def refusal_of(answer: httpx.Response) -> Refusal:
    body = answer.json()
    assert 400 <= answer.status_code < 500, (answer.status_code, body)
    return Refusal(
        type=body["type"],
        message=body["error"],
        category=body["category"],
        status=answer.status_code,
    )
