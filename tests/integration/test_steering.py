"""Runs are stopped and bounded while an unmodified SDK trains."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import tinker
from tinker import TrainingClient

from tests.integration.test_cli import tandem
from tests.support.sdk import adam, sequences, supervised
from tests.support.stacks import TIED, TestStack, running, session_of
from tests.support.waiting import PATIENCE, wait_until

pytestmark = pytest.mark.slow

SAMPLER_OFF = {"tandem.sampler": "none"}
BATCH = [supervised(tokens) for tokens in sequences(4, seed=5)]
TOKENS = sum(len(datum.model_input.to_ints()) for datum in BATCH)


class Loop(threading.Thread):
    """An ordinary training loop, which keeps one step ahead of its results until an error."""

    def __init__(self, training: TrainingClient) -> None:
        super().__init__(daemon=True)
        self.training = training
        self.steps = 0
        self.error: Exception | None = None
        self.told_after = 0.0

    def run(self) -> None:
        try:
            pending = self.send()
            while True:
                following = self.send()
                asked = time.monotonic()
                pending.result()
                self.steps += 1
                pending = following
        except Exception as error:  # noqa: BLE001 - the test looks at it
            self.told_after = time.monotonic() - asked
            self.error = error

    def send(self):
        self.training.forward_backward(BATCH, "cross_entropy")
        return self.training.optim_step(adam())


def new_run(service: tinker.ServiceClient) -> TrainingClient:
    made = service.create_lora_training_client(f"{TIED}:full", user_metadata=SAMPLER_OFF)
    return made.result()


def row_of(stack: TestStack, run_id: str) -> dict:
    with stack.stack.client() as client:
        found = client.get("runs").raise_for_status().json()["runs"]
    return next(row for row in found if row["id"] == run_id)


def stop(stack: TestStack, run_id: str) -> dict:
    with stack.stack.client() as client:
        return client.post(f"runs/{run_id}/stop", json={}).raise_for_status().json()


def key_of(stack: TestStack, owner: str) -> str:
    arguments = ("--owner", owner, "--data-dir", str(stack.data_dir), "--json")
    return str(json.loads(tandem("keys", "create", *arguments).stdout)["key"])


def test_an_admin_stops_a_run_in_the_middle_and_its_script_goes_on_from_the_checkpoint(
    stack: TestStack,
) -> None:
    here = ("--data-dir", str(stack.data_dir))
    with stack.service(api_key=key_of(stack, "ann")) as service:
        training = new_run(service)
        loop = Loop(training)
        loop.start()
        wait_until(lambda: loop.steps >= 3, what="three steps are made")
        answer = stop(stack, training.model_id)
        loop.join(PATIENCE)
        assert isinstance(loop.error, tinker.RequestFailedError)
        assert "run_stopped: local has stopped the run" in str(loop.error)
        assert loop.told_after < 30, "the SDK repeated the request"
        wait_until(lambda: stop(stack, training.model_id)["state"] == "ended")
        told = tandem("runs", "stop", training.model_id, *here).stdout
        assert not answer["already"]
        assert "had already ended" in told
        path = told.rpartition("Newest checkpoint: ")[2].strip()
        step = int(path.rpartition("-")[2])
        assert loop.steps <= step <= loop.steps + 2

        resumed = service.create_training_client_from_state_with_optimizer(
            path, user_metadata=SAMPLER_OFF
        ).result()
        resumed.forward_backward(BATCH, "cross_entropy")
        resumed.optim_step(adam()).result()
        assert row_of(stack, resumed.model_id)["last_step"]["step"] == step + 1
        session = session_of(training)
        running = [worker["id"] for worker in stack.status()["workers"]]
        assert not [each for each in running if each.startswith(f"trainer-{session}-train-0")]


def test_a_used_up_budget_ends_a_run_after_its_running_operation(stack: TestStack) -> None:
    here = ("--data-dir", str(stack.data_dir))
    key = key_of(stack, "ben")
    budget = 2 * TOKENS + 1
    tandem("owners", "set", "ben", "--tokens", f"{budget:.0f}", "--runs", "4", *here)
    with stack.service(api_key=key) as service:
        training = new_run(service)
        loop = Loop(training)
        loop.start()
        loop.join(PATIENCE)
        assert isinstance(loop.error, tinker.RequestFailedError)
        assert "budget_exhausted: the budget of ben is used up" in str(loop.error)
        row = wait_until(
            lambda: (
                row_of(stack, training.model_id)["state"] == "ended"
                and row_of(stack, training.model_id)
            )
        )
        assert f"{training.model_id}/weights/stopped-2" in row["reason"]
        shown = json.loads(tandem("owners", "show", "ben", *here, "--json").stdout)["budget"]
        assert shown["exhausted"]
        assert budget <= shown["used_tokens"] < budget + TOKENS
        with pytest.raises(tinker.PermissionDeniedError, match="budget of ben is used up"):
            new_run(service)
    assert "budget_exhausted" in tandem("owners", "list", *here).stdout


def test_a_gateway_that_is_killed_in_the_middle_of_a_stop_is_followed_by_one_that_completes_it(
    models: dict[str, Path], tmp_path: Path
) -> None:
    with running(tmp_path, models={TIED: models[TIED]}) as stack:
        service = stack.service()
        training = new_run(service)
        loop = Loop(training)
        loop.start()
        wait_until(lambda: loop.steps >= 2, what="two steps are made")
        trainer = stack.worker("trainer", session_id=session_of(training))
        frozen = stack.processes_of(trainer)
        for process in frozen:
            os.kill(process.pid, signal.SIGSTOP)
        killed = stack.stack.process
        assert stop(stack, training.model_id)["state"] == "ending"
        killed.kill()
        for process in frozen:
            os.kill(process.pid, signal.SIGCONT)
        wait_until(lambda: stack.stack.endpoint.pid != killed.pid, what="there is a next gateway")
        loop.join(PATIENCE)
        assert isinstance(loop.error, tinker.RequestFailedError)
        assert "run_stopped" in str(loop.error)
        wait_until(lambda: row_of(stack, training.model_id)["state"] == "ended")
        reason = row_of(stack, training.model_id)["reason"]
        path = reason.rpartition(" ")[2]
        assert path.startswith(f"tinker://{training.model_id}/weights/stopped-")
        resumed = service.create_training_client_from_state(path, user_metadata=SAMPLER_OFF)
        resumed.result().forward(BATCH, "cross_entropy").result()
        service.close("success")
