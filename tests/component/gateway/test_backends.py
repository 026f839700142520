"""Runs with a trainer backend that their host lacks."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib.metadata import version

import pytest

from gateway.workers.epoch import Epoch
from gateway.workers.launchers.agent import AgentLauncher
from tandem.agent.launcher import ProcessLauncher
from tandem.agent.service import serving
from tests.support.gateway.fake_launcher import HOST, FakeLauncher
from tests.support.gateway.running import running_gateway
from tests.support.other_packages import register

TWICE = "the trainer backend 'twice' is registered by one and by other: uninstall all but one"


@pytest.fixture
def gate(tmp_path):
    host = replace(HOST, backends={"fsdp2": "", "own": "", "twice": TWICE})
    with running_gateway(tmp_path, launcher=FakeLauncher(host=host)) as gate:
        yield gate


def create(gate, session_id: str, backend: str, number: int = 0):
    with gate.http() as client:
        return client.post(
            "/api/v1/create_model",
            json={
                "session_id": session_id,
                "model_seq_id": number,
                "base_model": "tiny:full",
                "user_metadata": {"tandem.backend": backend},
            },
        )


@pytest.mark.parametrize(
    ("backend", "sentence"),
    [
        ("fsdp3", "tandem.backend is 'fsdp3', which is no trainer backend; known: fsdp2, own"),
        ("twice", TWICE),
    ],
)
def test_it_is_refused_before_there_is_a_worker_or_a_run(gate, backend, sentence):
    answer = create(gate, gate.session_id(), backend)
    assert answer.status_code == 400
    assert sentence in answer.text
    assert gate.launcher.specs == []
    with gate.http() as client:
        assert client.get("/api/tandem/v1/runs").json()["runs"] == []
        refused = client.post(
            "/api/v1/create_session",
            json={"tags": [], "sdk_version": "t", "user_metadata": {"tandem.backend": backend}},
        )
    assert (refused.status_code, sentence in refused.text) == (400, True)


def test_the_number_of_a_refused_run_is_free_for_one_with_a_known_backend(gate):
    session_id = gate.session_id()
    assert create(gate, session_id, "fsdp3").status_code == 400
    answer = create(gate, session_id, "own")
    assert answer.status_code == 200
    gate.retrieve(answer.json()["request_id"])
    (spec,) = gate.launcher.specs
    assert spec.trainer.backend == "own"


async def test_an_agent_tells_which_backends_its_host_has(tmp_path, monkeypatch):
    register(tmp_path / "site", "one", twice="one:Backend", own="one:Backend")
    register(tmp_path / "site", "other", twice="other:Backend")
    monkeypatch.syspath_prepend(tmp_path / "site")
    launcher = ProcessLauncher(data_dir=tmp_path)
    epoch = Epoch(number=1, superseded=lambda: None)
    async with serving(launcher, data_dir=tmp_path):
        agent = AgentLauncher(data_dir=tmp_path, timeout=60, epoch=epoch)
        host = await agent.describe_host()
        await agent.close()
    assert (host.backends["fsdp2"], host.backends["own"]) == ("", "")
    assert "is registered by" in host.backends["twice"]
    found = {each.name: each for each in host.frameworks}
    assert (found["torch"].version, found["torch"].python) == (version("torch"), sys.executable)
