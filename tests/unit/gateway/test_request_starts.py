"""Requests of a burst begin in several turns of the event loop."""

from __future__ import annotations

import asyncio
import contextvars

from gateway.api.http_connection import STARTS, Starts

REQUEST = contextvars.ContextVar("REQUEST", default="none")


async def test_a_burst_begins_in_order_and_in_parts():
    starts, begun = Starts(), []

    def ask(number: int) -> None:
        starts.begin_request(lambda: begun.append(number))

    for number in range(3 * STARTS):
        ask(number)
    assert begun == [*range(STARTS)]
    await asyncio.sleep(0)
    assert begun == [*range(2 * STARTS)]
    ask(3 * STARTS)  # it does not overtake
    await asyncio.sleep(0)
    assert begun == [*range(3 * STARTS)]
    await asyncio.sleep(0)
    assert begun == [*range(3 * STARTS + 1)]


async def test_requests_of_a_later_turn_begin_at_once():
    starts, begun = Starts(), []
    for turn in range(3):
        for _ in range(STARTS):
            starts.begin_request(lambda turn=turn: begun.append(turn))
        assert begun.count(turn) == STARTS
        await asyncio.sleep(0)


async def test_a_waiting_request_does_not_begin_in_the_context_of_another():
    starts, contexts = Starts(), []

    async def ask(name: str) -> None:
        REQUEST.set(name)
        for _ in range(2 * STARTS):
            starts.begin_request(lambda: contexts.append(REQUEST.get()))

    await asyncio.create_task(ask("first"))
    await asyncio.sleep(0)
    assert contexts == ["first"] * STARTS + ["none"] * STARTS
