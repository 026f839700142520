"""`tandem blueprint run`, with programs that need no trainer."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tandem.errors import InvalidField, UserError
from tests.support.waiting import wait_until

DESCRIPTION = """
title = "A test"
about = "It returns numbers."
models = ["{models}"]
[needs]
minutes = 0.1
[parameters.value]
about = "the returned number"
type = "float"
default = 1.0
minimum = 0
[metrics.number]
at_least = 0.5
"""
RETURNS = """
def train(run):
    known = [each.model_name for each in run.service.get_server_capabilities().supported_models]
    assert run.model in known
    return {"number": run.number("value"), "seed": run.seed}
"""


def written(folder: Path, program: str = RETURNS, models: str = "*") -> tuple[object, ...]:
    """Write a blueprint, and return the arguments of its run."""
    place = folder / "blueprints" / "some"
    place.mkdir(parents=True)
    (place / "blueprint.toml").write_text(DESCRIPTION.format(models=models))
    (place / "train.py").write_text(program)
    return ("blueprint", "run", "some", "--folder", folder / "blueprints")


def test_a_sound_run_prints_its_numbers_with_their_bounds(tandem, tmp_path):
    told = tandem(*written(tmp_path), "--seed", 7)
    assert "number: 1 (at least 0.5)" in told
    assert "seed: 7\n" in told
    assert "some is sound" in told


def test_a_number_beyond_its_bound_fails_the_command_and_the_report(tandem, tmp_path):
    command = (*written(tmp_path), "--set", "value=0.25", "--junit", tmp_path / "report.xml")
    with pytest.raises(SystemExit) as ended:
        tandem(*command, "--json")
    assert ended.value.code == 1
    suite = ElementTree.parse(tmp_path / "report.xml").getroot()
    assert (suite.get("failures"), suite.get("errors")) == ("1", "0")


@pytest.mark.parametrize(
    ("program", "error"),
    [
        ("def train(run):\n    raise ValueError('no data')\n", "ValueError: no data"),
        ("def train(run):\n    return {'number': float('inf')}\n", "number"),
        ("import os\ndef train(run):\n    os.abort()\n", "its process was killed by SIGABRT"),
        ("import time\ndef train(run):\n    time.sleep(60)\n", "it did not end within 1 s"),
        ("", "AttributeError"),
    ],
)
def test_a_program_that_fails_is_an_error_of_the_report(tandem, tmp_path, program, error):
    report = tmp_path / "report.xml"
    timeout = ("--timeout", 1) if "sleep" in program else ()
    with pytest.raises(SystemExit) as ended:
        tandem(*written(tmp_path, program), "--junit", report, *timeout)
    assert ended.value.code == 1
    (found,) = ElementTree.parse(report).getroot().iter("error")
    assert error in found.get("message")


def test_a_run_is_refused_before_it_starts(tandem, tmp_path):
    command = written(tmp_path, models="Qwen/*")
    with pytest.raises(InvalidField, match="value is -1; allowed: at least 0"):
        tandem(*command, "--set", "value=-1")
    with pytest.raises(InvalidField, match="unknown model 'huge'"):
        tandem(*command, "--model", "huge")
    with pytest.raises(UserError, match=r"some is for Qwen/\*; tiny does not fit"):
        tandem(*command, "--model", "tiny")
    with pytest.raises(UserError, match="the gateway has no such base model"):
        tandem(*command)


def test_the_sessions_runs_have_the_blueprints_deadline_and_end_with_its_program(
    gate, tandem, tmp_path
):
    program = """
def train(run):
    client = run.service.create_lora_training_client(run.model, rank=4).result()
    return {"number": 1}
"""
    tandem(*written(tmp_path, program), "--timeout", 60)
    (options,) = {spec.run_id for spec in gate.launcher.specs if spec.kind == "trainer"} or {""}
    assert options
    wait_until(lambda: not gate.run(gate.gateway.runs.all))


def test_the_list_names_an_unusable_blueprint_with_the_reason(tandem, tmp_path):
    written(tmp_path)
    (tmp_path / "blueprints" / "some" / "train.py").unlink()
    found = json.loads(tandem("blueprint", "list", "--folder", tmp_path / "blueprints", "--json"))
    reasons = {each["name"]: each["reason"] for each in found["blueprints"]}
    assert "has no train.py" in reasons["some"]
    assert reasons["grpo-arithmetic"] == ""
