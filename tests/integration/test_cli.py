"""The `tandem` command against a running stack."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from tinker import TrainingClient

from tests.support.ports import known_port
from tests.support.processes import marked
from tests.support.sdk import SOON
from tests.support.stacks import LLAMA, TIED, TestStack
from tests.support.waiting import wait_until

TANDEM = str(Path(sys.executable).parent / "tandem")


def tandem(*arguments: str, ok: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([TANDEM, *arguments], capture_output=True, text=True, timeout=240)
    assert (done.returncode == 0) == ok, (done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    return done


@dataclass
class Command:
    """A running `tandem` command, and its processes' mark."""

    process: subprocess.Popen[str]
    mark: str

    def interrupt(self) -> int:
        """Send Ctrl-C, check that no process is left, and return the exit status."""
        self.process.send_signal(signal.SIGINT)
        status = self.process.wait(timeout=240)
        wait_until(lambda: not marked(self.mark), what="the command's processes have ended")
        return status


def start(*arguments: str) -> Command:
    mark = f"command-{uuid.uuid4().hex}"
    # A shell makes its background jobs ignore Ctrl-C, and these tests inherit that. A command in
    # the foreground does not.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = subprocess.Popen(
            [TANDEM, *arguments],
            env={**os.environ, "TANDEM_TEST_COMMAND_MARK": mark},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
    finally:
        signal.signal(signal.SIGINT, before)
    return Command(process, mark)


@pytest.fixture
def up(models: dict[str, Path], tmp_path: Path) -> Iterator[tuple[Command, dict, Path]]:
    """A `tandem up --json` with one model, its output and its data directory."""
    port = str(known_port())  # no other test's server gets it after this one
    command = start(
        *("up", "--json", "--port", port, "--data-dir", str(tmp_path)),
        *("--model", f"{TIED}={models[TIED]}"),
    )
    assert command.process.stdout is not None
    text = ""
    while not text.rstrip().endswith("}"):
        line = command.process.stdout.readline()
        assert line, "tandem up ended early"
        text += line
    yield command, json.loads(text), tmp_path
    if command.process.poll() is None:
        command.interrupt()


def test_up_prints_a_url_and_a_key_that_work_and_ctrl_c_ends_it(
    up: tuple[Command, dict, Path],
) -> None:
    command, printed, _data_dir = up
    assert printed["api_key"].startswith("tml-")
    answer = httpx.get(
        f"{printed['url']}/api/v1/get_server_capabilities",
        headers={"X-API-Key": printed["api_key"]},
        timeout=SOON,
    )
    assert [model["model_name"] for model in answer.json()["supported_models"]] == [TIED]
    assert command.interrupt() == 0
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{printed['url']}/api/v1/healthz", timeout=SOON)


def test_models_are_added_and_listed(
    up: tuple[Command, dict, Path], models: dict[str, Path]
) -> None:
    at = ("--data-dir", str(up[2]))
    added = json.loads(tandem("models", "add", LLAMA, str(models[LLAMA]), "--json", *at).stdout)
    assert added["name"] == LLAMA
    listed = json.loads(tandem("models", "list", "--json", *at).stdout)["models"]
    assert {model["name"]: model["path"] for model in listed} == {
        TIED: str(models[TIED]),
        LLAMA: str(models[LLAMA]),
    }
    assert LLAMA in tandem("models", "list", *at).stdout
    refused = tandem("models", "add", "x", str(models[LLAMA].parent), *at, ok=False)
    assert "Hugging Face layout" in refused.stderr
    tandem("models", "remove", LLAMA, *at)
    assert LLAMA not in tandem("models", "list", *at).stdout


def test_status_shows_sessions_runs_samplers_and_workers(
    stack: TestStack, run: TrainingClient
) -> None:
    at = ("--data-dir", str(stack.data_dir))
    run.save_weights_and_get_sampling_client().result(timeout=240)

    def status_and_run() -> tuple[dict, dict]:
        status = json.loads(tandem("status", "--json", *at).stdout)
        return status, next(row for row in status["runs"] if row["id"] == run.model_id)

    wait_until(lambda: status_and_run()[1]["queued"] == 0)  # a publish ends after its result
    status, mine = status_and_run()
    assert (mine["state"], mine["base_model"]) == ("ready", TIED)
    assert status["sessions"] and status["samplers"]
    assert {worker["kind"] for worker in status["workers"]} == {"trainer", "sampler"}
    assert "workers" in tandem("status", *at).stdout


def test_logs_lists_and_prints_the_logs_of_workers(stack: TestStack, run: TrainingClient) -> None:
    at = ("--data-dir", str(stack.data_dir))
    listed = json.loads(tandem("logs", "--json", *at).stdout)["logs"]
    states = {log["log"]: log["state"] for log in listed}
    assert states["gateway"] == "ready"
    trainer = next(log["log"] for log in listed if log["run"] == run.model_id)
    assert (trainer in tandem("logs", *at).stdout, states[trainer]) == (True, "ready")
    lines = json.loads(tandem("logs", trainer, "-n", "3", "--json", *at).stdout)["lines"]
    assert 1 <= len(lines) <= 3
    assert all(json.loads(line["text"])["event"] for line in lines)
    published = tandem("logs", "--run", run.model_id, *at).stdout
    assert published.index("trainer: operation") < published.index("gateway: published")
    assert "no log of" in tandem("logs", "../tandem.db", *at, ok=False).stderr


def test_config_and_version_are_json_and_hold_no_secret(monkeypatch) -> None:
    monkeypatch.setenv("TANDEM_API_KEY", "tml-very-secret")
    monkeypatch.setenv("TANDEM_TRAINER_RANKS", "3")
    text = tandem("config", "--json").stdout
    assert json.loads(text)["trainer"]["ranks"] == 3
    assert "very-secret" not in text
    versions = json.loads(tandem("version", "--json").stdout)
    assert versions["tandem"]


@pytest.mark.parametrize("command", [("status",), ("models", "list"), ("models", "add", "x", ".")])
def test_without_a_gateway_the_command_says_how_to_start_one(
    tmp_path: Path, command: tuple[str, ...]
) -> None:
    refused = tandem(*command, "--data-dir", str(tmp_path), ok=False)
    assert "tandem up" in refused.stderr


def test_ctrl_c_of_the_demo_leaves_nothing_running(tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    command = start(
        *("demo", "--ranks", "1", "--out", str(tmp_path / "out")), "--data-dir", str(data_dir)
    )

    def services() -> int:
        names = ("-m gateway", "-m trainer_service")  # the first sample starts the sampler
        commands = [process.command for process in marked(command.mark)]
        return sum(any(name in each for each in commands) for name in names)

    wait_until(lambda: services() == 2, what="gateway and trainer run")
    assert command.interrupt() == 130
    assert command.process.stderr is not None
    assert "Interrupted" in command.process.stderr.read()
