"""Jobs of TRL on a real stack: their record, their result, and their ends."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tinker import TrainingClient

from tests.support.processes import marked
from tests.support.sdk import (
    TIMEOUT,
    largest_difference,
    logprobs,
    prompt_logprobs,
    sequences,
    train,
)
from tests.support.stacks import TIED, TestStack, running
from tests.support.trl_jobs import needs_trl
from tests.support.waiting import wait_until

pytestmark = [needs_trl, pytest.mark.nightly]
TOLERANCE = 1e-4
TOKENS = sequences(5, seed=71)
ROWS = "".join(
    json.dumps({"prompt": f"{n} + 1 =", "completion": f" {n + 1}"}) + "\n" for n in range(16)
)


@pytest.fixture(scope="module")
def own_stack(
    models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TestStack]:
    folder = tmp_path_factory.mktemp("data")
    with running(folder, models={TIED: models[TIED]}, settings={"trainer_ranks": "1"}) as stack:
        yield stack


class TrlRun:
    """A submitted job of TRL."""

    def __init__(self, stack: TestStack, *, max_restarts: int = 0, **values: object) -> None:
        self.stack = stack
        configuration = {
            "method": "sft",
            "learning_rate": 1e-3,
            "steps": 4,
            "batch_size": 2,
            "save_steps": 2,
            "max_length": 64,
        }
        body = {
            "backend": "trl",
            "model": TIED,
            "name": "sums",
            "configuration": configuration | values,
            "data": {"train": ROWS},
            "processes": 2,
            "max_restarts": max_restarts,
        }
        with stack.stack.client() as client:
            answer = client.post("jobs", json=body)
            assert answer.status_code == 200, answer.text
        self.id: str = answer.json()["id"]

    def about(self) -> dict:
        with self.stack.stack.client() as client:
            return client.get(f"jobs/{self.id}").json()

    def steps(self) -> list[int]:
        with self.stack.stack.client() as client:
            found = client.get(f"runs/{self.id}/metrics", params={"name": "tandem/loss"}).json()
        return found["metrics"].get("tandem/loss", {"step": []})["step"]

    def finished(self) -> dict:
        wait_until(lambda: self.about()["state"] == "ended", timeout=TIMEOUT)
        about = self.about()
        assert about["reason"] == "the job has finished"
        return about

    def worker(self) -> dict:
        return self.stack.worker("job", session_id=self.id.partition(":")[0])

    def is_gone(self) -> bool:
        """Whether no process of it is left."""
        return not any("trainer_service.jobs" in each.command for each in marked(self.stack.mark))


@pytest.mark.parametrize("rank", [pytest.param(4, id="lora"), pytest.param(0, id="all")])
def test_two_processes_train_and_the_result_is_sampled_and_continued(
    own_stack: TestStack, rank: int
) -> None:
    job = TrlRun(own_stack, lora_rank=rank)
    about = job.finished()
    assert [each["world_size"] for each in about["world"]] == [2, 2]
    assert len({each["sha256"] for each in about["world"]}) == 2
    assert job.steps() == [1, 2, 3, 4]
    assert about["progress"]["percent"] == 100
    with own_stack.service() as service:
        continued = service.create_training_client_from_state(about["result"]["weights"]).result(
            timeout=TIMEOUT
        )
        sampler = service.create_sampling_client(
            model_path=about["result"]["sampler_weights"]
        ).result(timeout=TIMEOUT)
        served = prompt_logprobs(sampler, TOKENS)
        assert largest_difference(logprobs(continued, TOKENS), served) < TOLERANCE
        of_base = service.create_sampling_client(base_model=TIED).result(timeout=TIMEOUT)
        assert largest_difference(prompt_logprobs(of_base, TOKENS), served) > 10 * TOLERANCE
        check_that_training_continues(continued)
    assert wait_until(job.is_gone)


def check_that_training_continues(training: TrainingClient) -> None:
    before = logprobs(training, TOKENS)
    train(training, seed=79)
    assert largest_difference(logprobs(training, TOKENS), before) > 100 * TOLERANCE


def test_a_killed_gateway_a_killed_worker_and_a_stop(own_stack: TestStack) -> None:
    """The next gateway reads on, the next attempt resumes, and a stop leaves nothing."""
    job = TrlRun(own_stack, steps=400, max_restarts=1)
    wait_until(lambda: len(job.steps()) > 3, timeout=TIMEOUT)
    killed, worker = own_stack.stack.endpoint, job.worker()
    own_stack.stack.process.kill()
    wait_until(lambda: own_stack.stack.endpoint.pid != killed.pid, what="the next gateway")
    seen = len(job.steps())
    wait_until(lambda: len(job.steps()) > seen + 2, timeout=TIMEOUT)
    assert job.worker()["id"] == worker["id"]
    os.kill(worker["pid"], signal.SIGKILL)
    wait_until(lambda: job.about()["attempt"] == 2, timeout=TIMEOUT)
    seen = len(job.steps())
    wait_until(lambda: len(job.steps()) > seen + 2, timeout=TIMEOUT)
    steps = job.steps()
    assert steps == list(range(1, len(steps) + 1))
    with own_stack.stack.client() as client:
        client.post(f"runs/{job.id}/stop", json={}).raise_for_status()
    wait_until(lambda: job.about()["state"] == "ended", timeout=TIMEOUT)
    assert job.about()["restarts"] == 1
    assert job.about()["result"] is None
    assert wait_until(job.is_gone)
