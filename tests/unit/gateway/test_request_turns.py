"""How many requests begin in one turn of the gateway's event loop."""

from __future__ import annotations

import asyncio

import pytest

from gateway.api.errors import ErrorResponses
from gateway.api.middleware import RequestBoundary, Turns


async def test_a_few_requests_begin_in_each_turn_and_what_they_began_goes_on_between():
    turns, begun, steps = Turns(at_once=2), [], []

    async def request(number: int) -> None:
        await turns.begin()
        begun.append(number)
        await asyncio.sleep(0)
        steps.append((number, len(begun)))

    await asyncio.gather(*(request(number) for number in range(6)))
    assert begun == [0, 1, 2, 3, 4, 5]
    assert all(others <= number + 4 for number, others in steps)
    assert steps[0] == (0, 2)  # the first goes on before the third begins


async def test_a_request_that_does_not_wait_any_more_takes_no_turn():
    turns = Turns(at_once=1)
    first, gone, last = (asyncio.create_task(turns.begin()) for _ in range(3))
    await first
    gone.cancel()
    await asyncio.wait_for(last, timeout=30)
    assert gone.cancelled()
    await asyncio.wait_for(turns.begin(), timeout=30)


@pytest.mark.parametrize("path", ["healthz", "readyz", "session_heartbeat"])
async def test_health_and_heartbeats_begin_before_requests_that_wait_for_their_turn(path):
    begun: list[str] = []

    async def app(scope, _receive, _send) -> None:
        begun.append(scope["path"])

    boundary = RequestBoundary(app, errors=ErrorResponses({}))
    boundary._turns = Turns(at_once=0)
    boundary._note = lambda *_, **__: None
    scopes = [{"type": "http", "path": f"/api/v1/{p}"} for p in ("asample", path)]
    waiting, vital = (asyncio.create_task(boundary(s, None, None)) for s in scopes)
    await asyncio.wait_for(vital, timeout=30)
    assert begun == [f"/api/v1/{path}"]
    waiting.cancel()
