from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from starlette.requests import ClientDisconnect

from gateway.api.openai.service import EngineStarting, SamplesInProgress
from gateway.checkpoints.base_models import BaseModelEntry
from gateway.sampling.sessions import base_version
from gateway.storage.futures.table import Result, Waiting
from tandem.errors import GatewayRestarted, OperationTimedOut
from tandem.v1 import sampler_pb2
from tandem.wire.v1 import tinker_pb2
from tests.support.waiting import until

MAX_UNREAD = 64
MODEL = BaseModelEntry(name="m", path="/m", max_length=8)


class FakeSamplers:
    def __init__(self):
        self.taken = []
        self.cancelled = []

    def submit(self, _sampler, *, future, request, tell, check):
        self.taken.append(SimpleNamespace(future=future, request=request, tell=tell))

    def cancel(self, request_id):
        self.cancelled.append(request_id)


class FakeSessions:
    def __init__(self):
        self.touched = 0

    def touch(self, _session_id):
        self.touched += 1


def make_generation(*, state="ready", closing=False, operation_timeout=1800.0):
    sampler = SimpleNamespace(
        serves=state == "ready",
        describe_sample=lambda _id: Waiting("the sampler is starting"),
    )
    gateway = SimpleNamespace(
        sessions=FakeSessions(),
        samplers=FakeSamplers(),
        futures=SimpleNamespace(closing=closing),
        settings=SimpleNamespace(operation_timeout=operation_timeout),
    )
    generation = SamplesInProgress(
        gateway,
        session=SimpleNamespace(id="s-1:sample:0", session_id="s-1", version=base_version(MODEL)),
        sampler=sampler,
        owner="ann",
        builder=None,
        check=lambda _version: None,
        poll_interval=0.01,
        max_unread=MAX_UNREAD,
    )
    generation.submit(sampler_pb2.SampleRequest(), seq_id=7, stream=True)
    return generation, gateway.samplers


async def test_a_request_has_its_seq_id_session_and_version():
    _generation, samplers = make_generation()
    (taken,) = samplers.taken
    request = taken.request
    assert (request.operation_id, request.seq_id) == ("s-1:sample:0:7", 7)
    assert (request.session_id, request.version.name) == ("s-1", "base/m")
    assert taken.future.owner == "ann"


async def test_a_slow_reader_holds_up_the_engine_and_fills_no_memory():
    generation, samplers = make_generation()
    tell = samplers.taken[0].tell

    async def talk():
        for index in range(1000):
            await tell(sampler_pb2.SampleDelta(index=index))

    talking = asyncio.create_task(talk())
    await asyncio.sleep(0)
    assert generation._events.qsize() == MAX_UNREAD
    seen, events = [], generation.events()
    while len(seen) < 1000:
        _prompt, delta = await anext(events)
        seen.append(delta.index)
        assert generation._events.qsize() <= MAX_UNREAD
    assert seen == list(range(1000))
    await talking


async def test_the_whole_response_comes_after_the_tokens():
    generation, samplers = make_generation()
    taken = samplers.taken[0]
    await taken.tell(sampler_pb2.SampleDelta(index=0))
    response = tinker_pb2.SampleResponse(prompt_cache_hit_tokens=3)
    taken.future.resolve(Result(media="protobuf", body=response.SerializeToString()))
    told = [event async for event in generation.events()]
    assert told == [(0, sampler_pb2.SampleDelta(index=0)), (0, response)]
    generation.cancel()
    assert samplers.cancelled == []


async def test_a_disconnect_ends_the_wait():
    generation, samplers = make_generation()

    async def receive():
        return {"type": "http.disconnect"}

    generation.listen_for_disconnect(receive)
    with pytest.raises(ClientDisconnect):
        await anext(generation.events())
    generation.cancel()
    assert samplers.cancelled == ["s-1:sample:0:7"]


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"state": "starting"}, EngineStarting),
        ({"state": "failed"}, EngineStarting),
        ({}, OperationTimedOut),
        ({"closing": True}, GatewayRestarted),
    ],
)
async def test_every_wait_has_a_timeout(monkeypatch, changes, error):
    monkeypatch.setattr("gateway.api.openai.service.START_TIMEOUT", 0.02)
    generation, _samplers = make_generation(operation_timeout=0.02, **changes)
    with pytest.raises(error):
        await anext(generation.events())


async def test_waiting_keeps_the_session_alive():
    generation, samplers = make_generation()
    waiting = asyncio.ensure_future(anext(generation.events()))
    await until(lambda: generation._gateway.sessions.touched >= 2)
    samplers.taken[0].future.resolve(Result(media="protobuf"))
    assert await waiting == (0, tinker_pb2.SampleResponse())
