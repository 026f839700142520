"""The garbage collector does not stop the gateway for long."""

from __future__ import annotations

import gc

import pytest

from gateway import app
from gateway.sampling.sampler import SampleCall
from tandem.errors import PublishFailed
from tests.support.gateway.requests import asample, new_sampler
from tests.support.gateway.running import running_gateway
from tests.support.waiting import wait_until

MANY = 300_000


def test_few_objects_are_young_although_as_many_old_ones_are_freed(tmp_path, monkeypatch):
    monkeypatch.setattr(app, "_MANY_SAMPLES", -1)
    with running_gateway(tmp_path):
        old = [[] for _ in range(MANY)]
        gc.collect()
        new = []
        while old:
            old.pop()
            new.append([])
        wait_until(lambda: len(gc.get_objects(generation=0)) < MANY / 10)


@pytest.mark.parametrize("many", [False, True])
def test_a_full_collection_comes_later_while_many_samples_wait(tmp_path, monkeypatch, many):
    monkeypatch.setattr(app, "_MANY_SAMPLES", -1 if many else 1)
    monkeypatch.setattr(app, "_FULL_COLLECTION", 3)
    with running_gateway(tmp_path):
        before = gc.get_stats()[2]["collections"]
        wait_until(lambda: gc.collect(1) or gc.get_count()[2] > 3 or not many)
        if many:
            assert gc.get_stats()[2]["collections"] == before
            monkeypatch.setattr(app, "_LATEST_FULL_COLLECTION", 3)
        wait_until(lambda: gc.collect(1) or gc.get_stats()[2]["collections"] > before)


def test_a_failed_sample_is_freed_without_a_collection(tmp_path):
    with running_gateway(tmp_path) as gate, gate.http() as client:
        sampler = new_sampler(gate)
        gate.retrieve(asample(client, sampler).json()["request_id"])
        gate.worker("sampler")[1].sample_error = PublishFailed("it failed")
        gc.collect()
        gc.disable()
        try:
            request_id = asample(client, sampler, 1).json()["request_id"]
            assert "it failed" in str(gate.retrieve(request_id).json())
            wait_until(lambda: not [o for o in gc.get_objects() if isinstance(o, SampleCall)])
        finally:
            gc.enable()


def test_collections_go_on_when_the_gateway_listens(tmp_path):
    gc.disable()  # as at the start of a process
    try:
        with running_gateway(tmp_path):
            assert gc.isenabled()
    finally:
        gc.enable()
