"""Fixtures: a gateway with fake workers for each module, a `World`, and SDK clients."""

from __future__ import annotations

import pytest
import tinker

from tests.support.gateway.access_world import GROUPS, World
from tests.support.gateway.running import running_gateway


@pytest.fixture(scope="module")
def gate(tmp_path_factory):
    with running_gateway(tmp_path_factory.mktemp("gateway"), session_ttl=600) as gate:
        yield gate


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    with running_gateway(folder, session_ttl=600, groups=GROUPS) as gate:
        yield World(gate, folder)


@pytest.fixture
def service(gate):
    with gate.service() as service:
        yield service


@pytest.fixture
def training(service):
    return service.create_lora_training_client("tiny:full").result()


@pytest.fixture
def rest(gate):
    return tinker.RestClient(base_url=gate.url, api_key=gate.settings.api_key)


@pytest.fixture
def start(tmp_path):
    def with_(**changes):
        return running_gateway(tmp_path, session_ttl=600, sequence_gap_timeout=20, **changes)

    return with_


@pytest.fixture
def no_wait(monkeypatch):
    """Trainers' starts are retried at once."""
    monkeypatch.setattr("gateway.workers.demand.Backoff.failed", lambda _: 0.0)
