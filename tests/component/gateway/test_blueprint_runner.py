"""The runner of the playground, with programs that train little."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import httpx
import psutil
import pytest
from typer.testing import CliRunner

from gateway.owners.auth.keys import NewKey
from tandem.blueprints.runner import BlueprintRunner
from tandem.cli.main import app
from tandem.errors import Overloaded, PermissionDenied
from tandem.settings.playground import PlaygroundSettings
from tests.support.gateway.running import KEY
from tests.support.waiting import wait_until

DESCRIPTION = """
title = "A test"
about = "It saves weights."
[needs]
minutes = 1
[parameters.value]
about = "the returned number"
type = "float"
default = 1.0
[metrics.number]
at_least = 0.5
"""
SAVES = """
def train(run):
    run.save_weights(run.training_client())
    return {"number": run.number("value")}
"""
SHOWS = """
import json, os, pathlib

def train(run):
    pathlib.Path(__file__).with_name("environment").write_text(json.dumps(dict(os.environ)))
    return {"number": 1.0}
"""
WAITS = """
import os, pathlib, time

def train(run):
    run.training_client()
    pathlib.Path(__file__).with_name("pid").write_text(str(os.getpid()))
    time.sleep(3600)
"""


@pytest.fixture
def start(start, tmp_path, monkeypatch):
    monkeypatch.setattr("tandem.blueprints.catalog._OURS", tmp_path / "blueprints")
    return partial(start, playground=PlaygroundSettings(runs=1))


def write(folder: Path, program: str) -> Path:
    place = folder / "blueprints" / "some"
    place.mkdir(parents=True)
    (place / "blueprint.toml").write_text(DESCRIPTION)
    (place / "train.py").write_text(program)
    return place


@contextmanager
def runner(gate) -> Iterator[None]:
    stop = threading.Event()
    trains = BlueprintRunner(url=gate.url, key=KEY, slots=1, say=print)
    thread = threading.Thread(target=trains.run_trials, args=[stop])
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def start_trial(gate, **values: float) -> str:
    """Return the id of a trial of ann's."""
    body = {"blueprint": "some", "model": "tiny", "values": values}
    key = gate.run(gate.gateway.keys.create(NewKey(owner="ann", role="member")))[1]
    answer = gate.http(key).post("/api/tandem/v1/playground/trials", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["id"]


def trial(gate, trial_id: str) -> dict:
    return gate.http().get(f"/api/tandem/v1/playground/trials/{trial_id}").json()


def reached(gate, trial_id: str, state: str) -> dict:
    return wait_until(lambda: (t := trial(gate, trial_id))["state"] == state and t)


def pid_in(folder: Path) -> int:
    return int(wait_until(lambda: (folder / "pid").exists() and (folder / "pid").read_text()))


def test_a_trained_trial_is_open_with_its_numbers_and_its_weights(start, tmp_path):
    write(tmp_path, SAVES)
    with start() as gate, runner(gate):
        mine = start_trial(gate, value=0.25)
        found = reached(gate, mine, "open")
        assert found["numbers"] == {"number": 0.25}
        assert found["violations"] == {"number": "0.25, and at least 0.5 is expected"}
        [owned] = (
            gate.http().get("/api/v1/training_runs?access_scope=accessible").json()["training_runs"]
        )
        run_id = owned["training_run_id"]
        assert found["weights"] == f"tinker://{run_id}/sampler_weights/tuned"
        assert owned["model_owner"] == "ann"


def test_the_program_of_an_ended_trial_is_killed(start, tmp_path):
    place = write(tmp_path, WAITS)
    with start() as gate, runner(gate):
        mine = start_trial(gate)
        pid = pid_in(place)
        gate.http().post(f"/api/tandem/v1/playground/trials/{mine}/end")
        wait_until(lambda: not psutil.pid_exists(pid))
        assert reached(gate, mine, "ended")["reason"] == "local ended it"
        assert gate.run(gate.gateway.runs.all) == []


def test_a_stopped_runner_kills_its_program_and_leaves_the_trial_to_another_one(start, tmp_path):
    place = write(tmp_path, WAITS)
    with start() as gate:
        with runner(gate):
            mine = start_trial(gate)
            pid = pid_in(place)
        assert not psutil.pid_exists(pid)
        assert trial(gate, mine)["state"] == "running"
        (place / "train.py").write_text(SAVES)
        gate.gateway.playground._heard[mine] -= 31
        with runner(gate):
            assert reached(gate, mine, "open")["attempt"] == 2


def test_a_program_that_fails_ends_the_trial_with_its_error(start, tmp_path):
    write(tmp_path, "def train(run):\n    raise ValueError('no data')\n")
    with start() as gate, runner(gate):
        found = reached(gate, start_trial(gate), "ended")
        assert found["reason"] == "ValueError: no data"


def test_a_program_gets_no_secret_of_the_runners_environment(start, tmp_path, monkeypatch):
    monkeypatch.setenv("TANDEM_API_KEY", "tml-of-the-administrator")
    monkeypatch.setenv("TANDEM_DATABASE_URL", "postgresql://tandem:secret@db/tandem")
    monkeypatch.setenv("SSL_CERT_FILE", "/etc/ssl/ca.crt")
    place = write(tmp_path, SHOWS)
    with start() as gate, runner(gate):
        reached(gate, start_trial(gate), "open")
        found = json.loads((place / "environment").read_text())
        assert not {"TANDEM_API_KEY", "TANDEM_DATABASE_URL"} & found.keys()
        assert found["SSL_CERT_FILE"] == "/etc/ssl/ca.crt"
        assert found["TINKER_API_KEY"] != KEY


def test_a_program_whose_key_is_refused_does_not_go_on(start, tmp_path):
    with start() as gate:
        trains = BlueprintRunner(url=gate.url, key="tml-wrong", slots=1, say=print)
        assert not trains._goes_on("trial-1", {"attempt": 1}, threading.Event())


def test_a_runner_without_an_administrators_key_ends_with_the_reason(start, tmp_path):
    with start() as gate:
        key = gate.run(gate.gateway.keys.create(NewKey(owner="ann", role="member")))[1]
        trains = BlueprintRunner(url=gate.url, key=key, slots=1, say=print)
        with pytest.raises(httpx.HTTPStatusError, match="403"):
            trains.run_trials(threading.Event())


def test_the_commands_of_the_playground_tell_how_it_stands(start, tmp_path, monkeypatch):
    write(tmp_path, SAVES)
    monkeypatch.setenv("COLUMNS", "250")
    with start() as gate:
        monkeypatch.setenv("TINKER_BASE_URL", gate.url)
        monkeypatch.setenv("TINKER_API_KEY", KEY)

        def tandem(*arguments: str) -> str:
            done = CliRunner().invoke(app, ["playground", *arguments])
            if done.exception is not None:
                raise done.exception
            return done.stdout

        assert "closed: 0 of 1 train, 0 wait" in tandem("close")
        with pytest.raises(PermissionDenied, match="closed for now"):
            tandem("start", "some", "--model", "tiny")
        tandem("open")
        told = tandem("start", "some", "--model", "tiny", "--set", "value=2")
        mine = told.split()[0]
        assert told == f"{mine} is number 1 in the queue.\n"
        with pytest.raises(Overloaded, match="number 1 in the queue"):
            tandem("start", "some", "--model", "tiny")
        assert mine in tandem("show")
        assert "ending: local ended it" in tandem("end", mine)
