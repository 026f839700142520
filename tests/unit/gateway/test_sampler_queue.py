"""What thousands of samples are told that wait at one sampler."""

from __future__ import annotations

import asyncio

import pytest

from gateway.checkpoints.base_models import BaseModelEntry
from gateway.checkpoints.pins import Pins
from gateway.futures.table import Future, Result
from gateway.metrics import Metrics
from gateway.sampling.places import EnginePlaces
from gateway.sampling.sampler import Sample, Sampler
from tandem.errors import SessionFinished
from tandem.settings import SamplerSettings
from tandem.v1 import sampler_pb2
from tests.support.work import calls_in

MANY = 2000


class NoFleet:
    """Workers that never start."""

    async def start(self, **_about):
        await asyncio.Event().wait()


@pytest.fixture
async def sampler():
    sampler = Sampler(
        session_id="s-1",
        owner="ann",
        model=BaseModelEntry(name="tiny", path="/tiny", max_length=None),
        max_lora_rank=0,
        settings=SamplerSettings(),
        fleet=NoFleet(),
        metrics=Metrics(),
        meter=None,
        pins=Pins(),
        places=EnginePlaces(most=1, most_starting=1, quantum=0),
    )
    yield sampler
    await sampler.stop(SessionFinished("over"))


def add(sampler, number: int) -> Future:
    name = f"s-1:sample:0:{number}"
    future = Future(request_id=name, source="sample", describe=lambda: sampler.describe(name))
    sampler.add(Sample(future=future, request=sampler_pb2.SampleRequest(operation_id=name)))
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
