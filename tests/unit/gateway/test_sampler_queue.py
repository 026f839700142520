"""What thousands of samples are told that wait at one sampler."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from gateway.checkpoints.base_models import BaseModelEntry
from gateway.checkpoints.pins import Pins
from gateway.metrics import Metrics
from gateway.placement.asks import Asks
from gateway.placement.places import Places
from gateway.sampling.engine import SamplerEngine
from gateway.sampling.sampler import SampleCall, Sampler, SamplerKey
from gateway.storage.futures.table import Future, Result
from gateway.workers.worker import Worker
from tandem.errors import SessionFinished
from tandem.settings.sharing import SharingSettings
from tandem.settings.workers import SamplerSettings
from tandem.v1 import sampler_pb2
from tests.support.gateway.leased_workers import not_leased_groups
from tests.support.gateway.placement import open_places
from tests.support.waiting import until
from tests.support.work import calls_in

MANY = 2000


class NoFleet:
    """Workers that never start."""

    async def start(self, _spec, **_about):
        await asyncio.Event().wait()

    def explain(self, _place):
        return ""


def make_sampler(session_id: str, *, fleet, places: Places) -> Sampler:
    model, pins = BaseModelEntry(name="tiny", path="/tiny", max_length=None), Pins()
    key = SamplerKey(session_id, model.name, 0)
    engine = SamplerEngine(
        key=str(key),
        session_id=session_id,
        owner="ann",
        model=model,
        max_lora_rank=0,
        settings=SamplerSettings(),
        sharing=SharingSettings(),
        asks=Asks(),
        fleet=fleet,
        places=places,
        leases=not_leased_groups(),
        pins=pins,
    )
    return Sampler(
        key=key,
        users={session_id},
        owner="ann",
        model=model,
        models=None,
        engine=engine,
        metrics=Metrics(),
        meter=None,
        pins=pins,
    )


async def one_place() -> Places:
    return await open_places(most_engines=1, most_starting=1, quantum=0)


@pytest.fixture
async def sampler():
    sampler = make_sampler("s-1", fleet=NoFleet(), places=await one_place())
    yield sampler
    await sampler.stop(SessionFinished("over"))


def add(sampler, number: int) -> Future:
    name = f"s-1:sample:0:{number}"
    future = Future(request_id=name, source="sample", describe=lambda: sampler.describe(name))
    sampler.add(SampleCall(future=future, request=sampler_pb2.SampleRequest(operation_id=name)))
    return future


async def test_each_is_told_its_place_without_a_look_at_all_others(sampler):
    futures = [add(sampler, number) for number in range(MANY)]
    for place in (0, 1, MANY - 1):
        assert f"; {place} sample{'' if place == 1 else 's'} before this one" in (
            futures[place].describe().reason
        )
    few, many = (calls_in(lambda place=p: futures[place].describe()) for p in (0, MANY - 1))
    assert many <= few + 5
    for ended in (0, 500, 700):
        futures[ended].resolve(Result(media="protobuf"))
    await asyncio.sleep(0)
    assert "; 1 sample before this one" in futures[2].describe().reason
    assert f"; {MANY - 4} samples before this one" in futures[-1].describe().reason
    assert f"; {MANY - 3} samples before this one" in add(sampler, MANY).describe().reason


class EnginesThatStopSlowly:
    """Engines that serve at once, and stop when the test sets `may_stop`."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.may_stop = asyncio.Event()

    async def start(self, spec, **_about):
        self.events.append(f"{spec.session_id} started")
        handle = SimpleNamespace(kind="sampler", worker_id=spec.session_id)
        return Worker(handle=handle, channel=MagicMock(), epoch=MagicMock(), identity=())

    async def stop(self, worker, *, reason):
        await self.may_stop.wait()
        self.events.append(f"{worker.worker_id} stopped")


@pytest.fixture
async def two_on_one_place():
    """The engine of the first serves and is idle; that of the second has not been asked for."""
    fleet, places = EnginesThatStopSlowly(), await one_place()
    first, second = (make_sampler(f"s-{n}", fleet=fleet, places=places) for n in (1, 2))
    first.engine.start()
    await until(lambda: first.engine.idle)
    yield first, second, fleet
    fleet.may_stop.set()
    for sampler in (first, second):
        await sampler.stop(SessionFinished("over"))


async def all_that_can_happen() -> None:
    """Let the event loop do what is waiting for nothing."""
    for _ in range(50):
        await asyncio.sleep(0)


async def test_the_end_of_a_sampler_waits_for_its_engine_that_makes_room(two_on_one_place):
    first, second, fleet = two_on_one_place
    second.engine.start()
    await until(lambda: not first.engine.idle)
    end = asyncio.create_task(first.stop(SessionFinished("over")))
    await all_that_can_happen()
    assert not end.done()
    fleet.may_stop.set()
    await end
    assert "s-1 stopped" in fleet.events
    assert first.engine.state == "stopped"


async def test_an_engine_that_is_being_stopped_keeps_its_place_until_it_has(two_on_one_place):
    first, second, fleet = two_on_one_place
    end = asyncio.create_task(first.stop(SessionFinished("over")))
    await all_that_can_happen()
    second.engine.start()
    await all_that_can_happen()
    fleet.may_stop.set()
    await end
    await until(lambda: second.engine.idle)
    assert fleet.events == ["s-1 started", "s-1 stopped", "s-2 started"]
    assert first.engine.state == "stopped"
