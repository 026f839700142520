"""A gateway stops on request, with or without its workers, and runs continue."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path

import orjson
import pytest

from tests.support.plain_http import PlainClient, message
from tests.support.stacks import TIED, TestStack, running
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow


@dataclass
class Run:
    """A run that trains without waiting for results."""

    client: PlainClient
    id: str

    def batch(self, number: int) -> None:
        self.client.forward_backward(message(self.id, 2 * number - 1, [1, 2, 3 + number]))

    def step(self, number: int) -> None:
        body = {"model_id": self.id, "seq_id": 2 * number, "adam_params": {}}
        self.client.post("optim_step", body)

    def train(self, *numbers: int) -> None:
        for number in numbers:
            self.batch(number)
            self.step(number)

    def logprobs(self, number: int) -> list[float]:
        return self.client.retrieve(f"{self.id}:{2 * number - 1}").logprobs.tolist()


def new_run(client: PlainClient, session_id: str, *, number: int = 0) -> Run:
    return Run(client, client.create_model(session_id, f"{TIED}:full", number=number))


def status_of(stack: TestStack, run: Run) -> dict:
    (row,) = [each for each in stack.status()["runs"] if each["id"] == run.id]
    return row


def test_a_gateway_that_is_asked_to_end_hands_its_trainers_over(
    models: dict[str, Path], tmp_path: Path
) -> None:
    with running(tmp_path, models=models) as stack:
        client = PlainClient(stack.stack.endpoint)
        session_id = client.create_session()
        disturbed = new_run(client, session_id)
        disturbed.train(1)
        first = disturbed.logprobs(1)
        trainer, ended = stack.worker("trainer", session_id=session_id), stack.stack.process
        disturbed.train(2, 3)  # without waiting for results
        ended.terminate()
        wait_until(lambda: stack.stack.endpoint.pid != ended.pid, what="there is another gateway")
        assert ended.returncode == 0
        disturbed.train(4)
        results = [first, *(disturbed.logprobs(number) for number in (2, 3, 4))]
        assert stack.worker("trainer", session_id=session_id)["pid"] == trainer["pid"]
        assert status_of(stack, disturbed)["restored"] == 0

        undisturbed = new_run(client, session_id, number=1)
        undisturbed.train(1, 2, 3, 4)
        assert results == [undisturbed.logprobs(number) for number in (1, 2, 3, 4)]


def test_a_stack_that_is_stopped_in_the_middle_of_a_step_computes_one_batch_again(
    models: dict[str, Path], tmp_path: Path
) -> None:
    settings = {"recovery_share": "1e-9", "session_ttl": "600"}
    with running(tmp_path, models=models, settings=settings) as stack:
        client = PlainClient(stack.stack.endpoint)
        session_id = client.create_session()
        run = new_run(client, session_id)
        run.train(*range(1, 31))
        run.batch(31)
        run.logprobs(31)
        assert status_of(stack, run)["snapshot_step"] == 0, "there was no reason for one yet"
    with running(tmp_path, models=models, settings=settings) as stack:
        client = PlainClient(stack.stack.endpoint)
        run = Run(client, run.id)
        run.step(31)
        run.train(32)
        result = run.logprobs(32)
        status = status_of(stack, run)
        assert (status["restored"], status["snapshot_step"]) == (1, 30)
        assert replayed(stack) == [1]

        undisturbed = new_run(client, session_id, number=1)
        undisturbed.train(*range(1, 33))
        assert undisturbed.logprobs(32) == result


def test_a_stop_says_what_it_waits_for_and_whoever_interrupts_it_does_not_wait(
    models: dict[str, Path], tmp_path: Path
) -> None:
    said: list[str] = []

    def interrupt(sentence: str) -> None:
        said.append(sentence)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may ignore it
    try:
        with running(tmp_path, models=models, say=interrupt) as stack:
            client = PlainClient(stack.stack.endpoint)
            session_id = client.create_session()
            run = new_run(client, session_id)
            os.kill(stack.worker("trainer", session_id=session_id)["pid"], signal.SIGSTOP)
            run.batch(1)
            wait_until(lambda: status_of(stack, run)["queued"], what="the batch is under way")
    finally:
        signal.signal(signal.SIGINT, before)
    (sentence,) = said
    assert sentence.startswith(f"1 run is being saved ({run.id} at step 0): ")


def replayed(stack: TestStack) -> list[int]:
    """Numbers of replayed operations, for each restored trainer."""
    lines = (line for line in stack.stack.log_path.read_bytes().splitlines() if line[:1] == b"{")
    entries = (orjson.loads(line) for line in lines)
    return [each["replayed"] for each in entries if each["event"] == "trainer_restored"]
