"""`tandem blueprint run`, with programs that need no trainer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import psutil
import pytest

from gateway.owners.auth.keys import NewKey
from tandem.blueprints import notebook
from tandem.errors import InvalidField, UserError
from tests.support.gateway.running import KEY
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
    with pytest.raises(InvalidField, match=r"value is -1\.0; allowed: at least 0"):
        tandem(*command, "--set", "value=-1")
    with pytest.raises(InvalidField, match="unknown model 'huge'"):
        tandem(*command, "--model", "huge")
    with pytest.raises(UserError, match=r"some is for Qwen/\*; tiny does not fit"):
        tandem(*command, "--model", "tiny")
    with pytest.raises(UserError, match="the gateway has no such base model"):
        tandem(*command)


WAITS = """
import os, pathlib, time

def train(run):
    client = run.service.create_lora_training_client(run.model, rank=4).result()
    pathlib.Path(__file__).with_name("run").write_text(f"{os.getpid()} {client.model_id}")
    time.sleep(3600)
"""


def test_nothing_of_a_killed_command_is_left_after_its_sessions_time(gate, tandem, tmp_path):
    """Its run has a deadline, too. A key of CI suffices."""
    command = [*written(tmp_path, WAITS), "--timeout", "600"]
    program = [str(Path(sys.executable).with_name("tandem")), *map(str, command)]
    note = tmp_path / "blueprints" / "some" / "run"
    _, key = gate.run(gate.gateway.keys.create(NewKey(owner="ci", role="ci")))
    with subprocess.Popen(program, env={**os.environ, "TINKER_API_KEY": key}) as started:
        wait_until(note.exists)
        pid, run_id = wait_until(lambda: note.read_text().split())
        asked = gate.run(lambda: gate.gateway.runs.get(run_id).options.deadline)
        started.kill()
    wait_until(lambda: not psutil.pid_exists(int(pid)))
    assert asked == "600"
    gate.age_sessions(600)
    wait_until(lambda: gate.run(gate.gateway.runs.all) == [])
    wait_until(lambda: gate.launcher.serving == [])


TRACKS = """
from tandem import track

def train(run):
    client = run.service.create_lora_training_client(run.model, rank=4).result()
    first, last = run.training_client(), run.copy_of(client)
    for each in (first, last):
        with track(each) as tracked:
            tracked.log(1, {"loss": run.number("value")})
            tracked.log(2, {"loss": 0.5})
    return {"number": 1}
"""


def test_a_notebook_runs_a_blueprint_and_reads_the_curve_of_its_last_run(
    gate, tmp_path, monkeypatch
):
    monkeypatch.setenv("TINKER_BASE_URL", gate.url)
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    written(tmp_path, TRACKS)
    result = notebook.run("some", folders=[tmp_path / "blueprints"], value=2.0)
    assert (result.error, result.sound, len(result.runs)) == ("", True, 2)
    assert notebook.curve(result, "loss") == {1: 2.0, 2: 0.5}
    with pytest.raises(UserError, match="no run of some recorded reward; recorded: loss"):
        notebook.curve(result, "reward")


def test_the_list_names_an_unusable_blueprint_with_the_reason(tandem, tmp_path):
    written(tmp_path)
    (tmp_path / "blueprints" / "some" / "train.py").unlink()
    found = json.loads(tandem("blueprint", "list", "--folder", tmp_path / "blueprints", "--json"))
    reasons = {each["name"]: each["reason"] for each in found["blueprints"]}
    assert "has no train.py" in reasons["some"]
    assert reasons["grpo-arithmetic"] == ""
