"""The wait for samples: slow readers, patience, and a gateway that stops."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from gateway.api.openai import generation
from gateway.api.openai.errors import NotReady
from gateway.api.openai.generation import ClientGone, Done, NewTokens, Running
from gateway.api.openai.models import Served
from gateway.checkpoints.base_models import BaseModelEntry
from gateway.futures.table import Result, Waiting
from gateway.sampling.sessions import base_version
from tandem.errors import GatewayRestarted, OperationTimedOut
from tandem.settings import OpenAISettings
from tandem.v1 import sampler_pb2
from tandem.wire.v1 import tinker_pb2

MODEL = BaseModelEntry(name="m", path="/m", max_length=8)
SERVED = Served(name="m", model=MODEL, version=base_version(MODEL), rank=0)


class FakeSamplers:
    """Keeps what it is given."""

    def __init__(self):
        self.taken = []
        self.cancelled = []

    def submit(self, _sampler, *, future, version, request, tell):
        self.taken.append(SimpleNamespace(future=future, request=request, tell=tell))

    def cancel(self, request_id):
        self.cancelled.append(request_id)


class FakeSessions:
    def __init__(self):
        self.touched = 0

    def touch(self, _session_id):
        self.touched += 1


def make_running(*, state="ready", closing=False, **settings):
    sampler = SimpleNamespace(state=state, describe=lambda _id: Waiting("the sampler is starting"))
    running = Running(
        settings=OpenAISettings(**settings),
        sessions=FakeSessions(),
        samplers=FakeSamplers(),
        session=SimpleNamespace(id="s-1:sample:0", session_id="s-1"),
        sampler=sampler,
        closing=lambda: closing,
    )
    running.ask(sampler_pb2.SampleRequest(), place=7, owner="ann", served=SERVED, stream=True)
    return running, running._samplers


@pytest.fixture(autouse=True)
def _glance_often(monkeypatch):
    monkeypatch.setattr(generation, "_GLANCE", 0.01)


async def test_a_request_has_its_place_session_and_version():
    _running, samplers = make_running()
    (taken,) = samplers.taken
    request = taken.request
    assert (request.operation_id, request.seq_id) == ("s-1:sample:0:7", 7)
    assert (request.session_id, request.version.name) == ("s-1", "base/m")
    assert taken.future.owner == "ann"


async def test_a_slow_reader_holds_up_the_engines_stream_and_not_the_memory():
    running, samplers = make_running()
    tell = samplers.taken[0].tell

    async def talk():
        for index in range(1000):
            await tell(sampler_pb2.SampleDelta(index=index))

    talking = asyncio.create_task(talk())
    await asyncio.sleep(0)
    assert running._events.qsize() == generation._UNREAD
    seen = []
    while len(seen) < 1000:
        event = await running.next()
        assert isinstance(event, NewTokens)
        seen.append(event.delta.index)
        assert running._events.qsize() <= generation._UNREAD
    assert seen == list(range(1000))
    await talking


async def test_the_whole_answer_comes_behind_the_tokens():
    running, samplers = make_running()
    taken = samplers.taken[0]
    await taken.tell(sampler_pb2.SampleDelta(index=0))
    response = tinker_pb2.SampleResponse(prompt_cache_hit_tokens=3)
    taken.future.resolve(Result(media="protobuf", body=response.SerializeToString()))
    assert isinstance(await running.next(), NewTokens)
    assert await running.next() == Done(prompt=0, response=response)
    assert await running.next() is None
    running.give_up()
    assert samplers.cancelled == []


async def test_a_client_that_goes_away_ends_the_wait():
    running, samplers = make_running()

    async def receive():
        return {"type": "http.disconnect"}

    running.listen(receive)
    with pytest.raises(ClientGone):
        await running.next()
    running.give_up()
    assert samplers.cancelled == ["s-1:sample:0:7"]


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"state": "starting", "start_timeout": 0.02}, NotReady),
        ({"state": "failed", "start_timeout": 0.02}, NotReady),
        ({"request_timeout": 0.02}, OperationTimedOut),
        ({"closing": True}, GatewayRestarted),
    ],
)
async def test_no_wait_is_for_ever(changes, error):
    running, _samplers = make_running(**changes)
    with pytest.raises(error):
        await running.next()


async def test_a_session_lives_while_somebody_waits():
    running, samplers = make_running()
    waiting = asyncio.create_task(running.next())
    while running._sessions.touched < 2:  # noqa: ASYNC110 - it is what is waited for
        await asyncio.sleep(0.005)
    samplers.taken[0].future.resolve(Result(media="protobuf"))
    assert isinstance(await waiting, Done)
