"""The list of trainer backends, over REST and as a command."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tandem.backends.frameworks import Framework
from tandem.cli import backends
from tandem.cli.main import app
from tests.support.gateway.fake_launcher import HOST, FakeLauncher
from tests.support.gateway.running import running_gateway
from tests.support.other_packages import PLAIN_BACKEND, install, register

TRL = Framework("trl", "1.16.0", "/opt/tandem/.venv/trl/bin/python")


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    return install(PLAIN_BACKEND, tmp_path_factory.mktemp("package"))


@pytest.fixture
def found(tmp_path, installed, monkeypatch) -> dict:
    """The answer of a gateway beside the wheel of the backend `plain`, whose host has TRL."""
    monkeypatch.syspath_prepend(installed)
    register(tmp_path / "site", "one", twice="one:Backend")
    register(tmp_path / "site", "other", twice="other:Backend")
    monkeypatch.syspath_prepend(tmp_path / "site")
    launcher = FakeLauncher(host=replace(HOST, frameworks=(TRL,)))
    with running_gateway(tmp_path, launcher=launcher) as gate, gate.http() as client:
        answer = client.get("/api/tandem/v1/backends")
    assert answer.status_code == 200
    return answer.json()


def test_built_in_backends_and_those_of_a_wheel_are_listed_with_framework_and_schema(found):
    by_name = {each["name"]: each for each in found["backends"]}
    assert list(by_name) == ["fsdp2", "plain", "trl", "twice"]
    assert [(each["kind"], each["framework"]) for each in found["backends"][:3]] == [
        ("step", "torch"),
        ("step", "torch"),
        ("job", "trl"),
    ]
    assert by_name["trl"]["version"] == "1.16.0"
    assert by_name["fsdp2"]["capabilities"] == ["adapters", "layouts", "sleep"]
    schema = by_name["trl"]["configuration"]["properties"]
    assert schema["learning_rate"]["exclusiveMinimum"] == 0
    assert "is registered by" in by_name["twice"]["reason"]
    assert "April 2025" in found["refused"]["torchtune"]


def test_the_command_prints_a_line_for_each_backend_or_the_whole_answer(found, monkeypatch):
    monkeypatch.setattr(backends, "call", lambda *_: found)
    monkeypatch.setenv("COLUMNS", "200")
    shown = CliRunner().invoke(app, ["backends"])
    assert shown.exit_code == 0, shown.output
    for words in (["fsdp2", "runs", "torch"], ["trl", "jobs", "trl", "1.16.0"], ["twice"]):
        assert any(all(word in line for word in words) for line in shown.output.splitlines())
    as_json = CliRunner().invoke(app, ["backends", "--json"])
    assert json.loads(as_json.output) == found
