from __future__ import annotations

import json
import sys

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


def test_the_needs_of_a_job_are_checked_by_the_same_command(run, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    needs = {"framework": "none", "python": sys.executable, "folder": str(tmp_path)}
    file = tmp_path / "needs.json"

    def check(**more: object):
        file.write_text(json.dumps(needs | {"model": str(tmp_path)} | more))
        return run("--worker", "--job", str(file), "--json")

    done = check()
    assert (done.exit_code, orjson.loads(done.stdout)["code"]) == (0, 0)
    done = check(model="/nowhere")
    assert (done.exit_code, orjson.loads(done.stdout)["code"]) == (30, 30)
    (fault,) = [each for each in orjson.loads(done.stdout)["checks"] if each["fault"]]
    assert (fault["name"], fault["fault"], fault["level"]) == (
        "model",
        "model_unreadable",
        "problem",
    )
    assert check(python="/nowhere/python").exit_code == 10
    refused = check(folder=1).exception
    assert str(refused).endswith("has no needs of a job: folder: Input should be a valid string")
    assert "name their file with --job" in str(run("--worker").exception)
