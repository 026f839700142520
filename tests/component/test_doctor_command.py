from __future__ import annotations

import json

import orjson
import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

from tandem.cli.main import app
from tandem.settings.gateway import settings_fault

GROUP = {"name": "g", "devices": ["cpu:9999"], "roles": ["trainer", "sampler"]}


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv("TANDEM_DATA_DIR", str(tmp_path))

    def run(*arguments: str, groups: list[object] | None = None):
        if groups is not None:
            monkeypatch.setenv("TANDEM_GROUPS", json.dumps(groups))
        return CliRunner().invoke(app, ["doctor", *arguments])

    return run


def test_it_says_what_is_here_and_what_is_not(run):
    done = run("--json")
    names = [each["name"] for each in orjson.loads(done.stdout)["checks"]]
    assert {"cores", "memory", "torch", "vllm", "cuda-checkpoint", "host memory budget"} <= {*names}
    assert "group cpu" in run().stdout


def test_groups_that_this_machine_cannot_have_are_a_problem(run):
    done = run(groups=[GROUP])
    assert done.exit_code == 1
    assert "TANDEM_GROUPS: group 'g': cpu:9999 is not there" in done.stdout


def test_a_volume_is_checked_by_the_same_command(run, tmp_path):
    done = run("--volume", str(tmp_path), "--json")
    found = {each["name"]: each["level"] for each in orjson.loads(done.stdout)["checks"]}
    assert (found, done.exit_code) == ({"volume": "ok", "locks": "ok", "rename": "ok"}, 0)
    assert run("--volume", str(tmp_path / "none")).exit_code == 1


def test_an_invalid_setting_is_named_although_the_data_directory_is(run, tmp_path, monkeypatch):
    monkeypatch.setenv("TANDEM_PORT", "abc")
    done = run("--data-dir", str(tmp_path))
    assert isinstance(done.exception, ValidationError)
    assert settings_fault(done.exception).startswith("TANDEM_PORT is 'abc'")
