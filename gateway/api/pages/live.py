"""One stream of server-sent events per open page, with only its changes.

A page has parts: elements with an id, which the server renders again, and sends if they changed.
The script `page.js` puts them into the page. A stream ends with the caller's session, key or token,
and with the gateway. A slow reader delays only its own stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field

import orjson
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.responses import Response

from gateway.api.pages.routing import Page
from tandem.errors import Unauthenticated

PERIOD = 1.0
"""Seconds between two looks for changes."""


@dataclass(frozen=True)
class Changes:
    """The parts of a page now, as HTML by the element's id, and new `points` for its charts. The
    next look gets the `cursor`. Parts that are left out stay."""

    cursor: str = ""
    parts: Mapping[str, str] = field(default_factory=dict)
    points: Mapping[str, object] = field(default_factory=dict)


Look = Callable[[str], Awaitable[Changes]]


def live_response(page: Page, look: Look, *, cursor: str = "") -> Response:
    """Answer with a stream of the changes that `look(cursor)` finds, once a second. Raises
    `Overloaded` if the owner has too many streams."""
    page.hold_stream()
    return EventSourceResponse(_events(page, look, cursor))


async def _events(page: Page, look: Look, cursor: str) -> AsyncIterator[ServerSentEvent]:
    sent: dict[str, int] = {}
    while not page.gateway.futures.closing:
        try:
            page.check_still_signed_in()
        except Unauthenticated:
            yield ServerSentEvent(event="signed-out", data="")
            return
        found = await look(cursor)
        cursor = found.cursor
        new = {name: text for name, text in found.parts.items() if sent.get(name) != hash(text)}
        sent.update((name, hash(text)) for name, text in new.items())
        if new or found.points:
            data = orjson.dumps({"parts": new, "points": found.points}).decode()
            yield ServerSentEvent(event="changes", data=data, id=cursor)
        await asyncio.sleep(PERIOD)
