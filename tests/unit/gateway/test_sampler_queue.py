"""Thousands of samples wait at one sampler, and each hears its position."""

from __future__ import annotations

import asyncio
from unittest.mock import MagicMock

import pytest

from gateway.checkpoints.base_models import BaseModelEntry
from gateway.checkpoints.pins import Pins
from gateway.metrics import Metrics
from gateway.owners.usage.meter import SampleMeter
from gateway.sampling.engine import SamplerEngine
from gateway.sampling.sampler import SampleCall, Sampler, SamplerKey
from gateway.storage.futures.table import Future, Result
from gateway.workers.overview import Overview
from gateway.workers.run_options import RunOptions
from tandem.settings.sharing import SharingSettings
from tandem.settings.workers import SamplerSettings
from tandem.v1 import sampler_pb2
from tests.support.work import calls_in

MANY = 2000


@pytest.fixture
def sampler():
    """A sampler whose engine never starts."""
    model, pins = BaseModelEntry(name="tiny", path="/tiny", max_length=None), Pins()
    key = SamplerKey("s-1", model.name, 0)
    supervisor = MagicMock()
    supervisor.roster.rows = {}
    supervisor.overview.return_value = Overview(
        now=0.0, rows={}, groups={}, settings=SharingSettings()
    )
    engine = SamplerEngine(
        key=str(key),
        sampler=str(key),
        session_id="s-1",
        model=model,
        max_lora_rank=0,
        settings=SamplerSettings(),
        options=RunOptions(),
        supervisor=supervisor,
        adapter=MagicMock(),
        processes=MagicMock(),
        pins=pins,
    )
    return Sampler(
        key=key,
        users={"s-1"},
        owner="ann",
        model=model,
        models=None,
        engine=engine,
        metrics=Metrics(),
        meter=SampleMeter(usage=MagicMock()),
        pins=pins,
        requests=MagicMock(),
    )


def add(sampler, number: int) -> Future:
    name = f"s-1:sample:0:{number}"
    future = Future(
        request_id=name, source="sample", describe=lambda: sampler.describe_sample(name)
    )
    request = sampler_pb2.SampleRequest(operation_id=name)
    sampler.queue_sample(SampleCall(future=future, request=request, check=lambda _version: None))
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
