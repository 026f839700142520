"""Requests of a burst begin in several turns of the event loop."""

from __future__ import annotations

import asyncio
import contextvars
from types import SimpleNamespace

from gateway.api.http_connection import STARTS, VITAL_STARTS, Starts


def request(path: str = "/api/v1/asample") -> SimpleNamespace:
    return SimpleNamespace(scope={"path": path}, disconnected=False)


REQUEST = contextvars.ContextVar("REQUEST", default="none")


async def test_a_burst_begins_in_order_and_in_parts():
    starts, begun = Starts(), []

    def ask(number: int) -> None:
        starts.begin_request(request(), lambda: begun.append(number))

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
            starts.begin_request(request(), lambda turn=turn: begun.append(turn))
        assert begun.count(turn) == STARTS
        await asyncio.sleep(0)


async def test_a_waiting_request_does_not_begin_in_the_context_of_another():
    starts, contexts = Starts(), []

    async def ask(name: str) -> None:
        REQUEST.set(name)
        for _ in range(2 * STARTS):
            starts.begin_request(request(), lambda: contexts.append(REQUEST.get()))

    await asyncio.create_task(ask("first"))
    await asyncio.sleep(0)
    assert contexts == ["first"] * STARTS + ["none"] * STARTS


async def test_a_request_whose_connection_closed_takes_no_turn():
    starts, begun = Starts(), []
    asked = [request() for _ in range(4 * STARTS)]
    for number, each in enumerate(asked):
        starts.begin_request(each, lambda number=number: begun.append(number))
    for each in asked[STARTS : 3 * STARTS]:
        each.disconnected = True
    await asyncio.sleep(0)
    assert begun == [*range(STARTS), *range(3 * STARTS, 4 * STARTS)]


async def test_vital_requests_pass_a_burst_but_do_not_stop_it():
    starts, begun = Starts(), []
    for _ in range(2 * STARTS):
        starts.begin_request(request(), lambda: begun.append("sample"))
    for _ in range(2 * VITAL_STARTS):
        starts.begin_request(request("/api/v1/healthz"), lambda: begun.append("healthz"))
    assert begun == ["sample"] * STARTS + ["healthz"] * VITAL_STARTS
    await asyncio.sleep(0)
    assert begun.count("sample") == 2 * STARTS
