"""Fixtures: a gateway with fake workers for each module, a `World`, SDK clients, and commands."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import tinker
from typer.testing import CliRunner

from tandem.cli.main import app
from tandem.settings.playground import PlaygroundSettings
from tests.support.gateway.access_world import GROUPS, World
from tests.support.gateway.running import KEY, running_gateway
from tests.support.ports import known_port


@pytest.fixture(scope="module")
def gate(tmp_path_factory):
    with running_gateway(tmp_path_factory.mktemp("gateway"), session_ttl=600) as gate:
        yield gate


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    playground = PlaygroundSettings(runs=1)
    with running_gateway(folder, session_ttl=600, groups=GROUPS, playground=playground) as gate:
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
def tandem(gate, tmp_path, monkeypatch) -> Callable[..., str]:
    """Runs a command as on another machine, in a folder without a data directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "250")
    monkeypatch.setenv("TINKER_BASE_URL", gate.url)

    def run(*arguments: object, key: str = KEY, text: str | None = None) -> str:
        monkeypatch.setenv("TINKER_API_KEY", key)
        done = CliRunner().invoke(app, [*map(str, arguments)], input=text)
        if done.exception is not None:
            raise done.exception
        return done.stdout

    return run


@pytest.fixture
def start(tmp_path):
    """Start a gateway on the last one's directory and port."""
    defaults = {"session_ttl": 600, "sequence_gap_timeout": 20, "port": known_port()}

    def with_(**changes):
        return running_gateway(tmp_path, **defaults | changes)

    return with_


@pytest.fixture
def no_wait(monkeypatch):
    """Trainers' starts are retried at once."""
    monkeypatch.setattr("gateway.workers.demand.Backoff.failed", lambda _: 0.0)
