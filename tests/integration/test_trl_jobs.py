"""Jobs of TRL on a real stack: their record, their result, and their ends."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tinker import TrainingClient

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
from tests.support.trl_runs import TrlRun
from tests.support.waiting import wait_until

pytestmark = [needs_trl, pytest.mark.nightly]
TOLERANCE = 1e-4
TOKENS = sequences(5, seed=71)


@pytest.fixture(scope="module")
def own_stack(
    models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TestStack]:
    folder = tmp_path_factory.mktemp("data")
    with running(folder, models={TIED: models[TIED]}, settings={"trainer_ranks": "1"}) as stack:
        yield stack


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
    job.stop()
    wait_until(lambda: job.about()["state"] == "ended", timeout=TIMEOUT)
    assert job.about()["restarts"] == 1
    assert job.about()["result"] is None
    assert wait_until(job.is_gone)


def test_a_killed_agent_leaves_nothing_and_the_next_one_resumes_the_job(
    own_stack: TestStack,
) -> None:
    job = TrlRun(own_stack, steps=400, max_restarts=1)
    wait_until(lambda: len(job.steps()) > 3, timeout=TIMEOUT)
    ranks = [each.pid for each in own_stack.processes() if "train.py" in each.command]
    assert len(ranks) >= 2
    os.kill(own_stack.stack.agent_process.pid, signal.SIGKILL)
    wait_until(lambda: job.about()["attempt"] == 2, timeout=TIMEOUT)
    assert not set(ranks) & {each.pid for each in own_stack.processes()}
    seen = len(job.steps())
    wait_until(lambda: len(job.steps()) > seen + 2, timeout=TIMEOUT)
    steps = job.steps()
    assert steps == list(range(1, len(steps) + 1))
    assert job.about()["restarts"] == 1
    job.stop()
    wait_until(lambda: job.about()["state"] == "ended", timeout=TIMEOUT)
    assert wait_until(job.is_gone)
