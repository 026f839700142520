"""kill -9 of each process, and what its client learns, and what still works afterwards.

The tests of this file share a stack of two ranks; each begins with what the one before left.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from support.data import adam, largest_difference, logprobs, sequences, supervised, train
from support.models import TIED
from support.plain import PlainClient, message
from support.processes import Process
from support.refusal import TIMEOUT, refusal, refusal_of
from support.sampling import prompt_logprobs
from support.stacks import TestStack, running, session_of
from support.waiting import wait_until
from tinker import ServiceClient, TrainingClient

DATA = [supervised(tokens) for tokens in sequences(4, seed=191)]


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def faulty(models: dict[str, Path], data_dir: Path) -> Iterator[TestStack]:
    with running(data_dir, models=models, settings={"trainer_ranks": "2"}) as stack:
        yield stack


@pytest.fixture(scope="module")
def other_service(faulty: TestStack) -> Iterator[ServiceClient]:
    with faulty.service() as service:
        yield service


@pytest.fixture(scope="module")
def state(other_service: ServiceClient) -> str:
    """A checkpoint of a run that has learned something."""
    run = other_service.create_lora_training_client(f"{TIED}:full").result(timeout=240)
    train(run, seed=192)
    return run.save_state("before").result(timeout=60).path


def trainer_of(stack: TestStack, run: TrainingClient) -> dict:
    number = stack.run(run)["id"]
    return next(
        worker
        for worker in stack.status()["workers"]
        if worker["kind"] == "trainer" and worker.get("run_id") == number
    )


def rank(stack: TestStack, worker: dict, number: int) -> Process:
    """The process of a rank: rank 0 leads the group, the other one is `trainer_service.rank`."""
    for process in stack.processes_of(worker):
        if ("trainer_service.rank" in process.command) == (number > 0):
            return process
    raise AssertionError(f"no rank {number} among {stack.processes_of(worker)}")


def gone(stack: TestStack, pids: set[int]) -> Callable[[], bool]:
    return lambda: not pids & {process.pid for process in stack.processes()}


@pytest.mark.parametrize("number", [0, 1])
def test_a_killed_rank_ends_the_run_with_a_typed_error_and_the_run_can_be_created_again(
    faulty: TestStack, other_service: ServiceClient, state: str, number: int
) -> None:
    run = other_service.create_training_client_from_state(state).result(timeout=120)
    probes = sequences(2, seed=193)
    then = logprobs(run, probes)
    worker = trainer_of(faulty, run)
    pids = {process.pid for process in faulty.processes_of(worker)}
    victim = rank(faulty, worker, number)

    os.kill(victim.pid, signal.SIGSTOP)  # so that it dies in the middle of an operation
    computed = run.forward_backward(DATA, "cross_entropy")
    stepped = run.optim_step(adam())
    wait_until(lambda: faulty.run(run)["queued"] >= 2, what="the operations are under way")
    os.kill(victim.pid, signal.SIGKILL)

    for future in (computed, stepped):
        refused = refusal(lambda future=future: future.result(timeout=TIMEOUT))
        assert (refused.type, refused.category) == ("worker_died", "server")
        assert f"rank {number}" in refused.message or (number == 0 and "trainer" in refused.message)
    later = refusal(lambda: run.forward(DATA, "cross_entropy").result(timeout=TIMEOUT))
    assert later.type == "worker_died", "also what is asked afterwards is told"
    assert faulty.run(run)["state"] == "ended"
    assert "signal 9" in faulty.run(run)["reason"] or "killed" in faulty.run(run)["reason"].lower()
    wait_until(gone(faulty, pids), what="no rank of the run is left")

    again = other_service.create_training_client_from_state(state).result(timeout=120)
    assert largest_difference(then, logprobs(again, probes)) == 0
    again.forward_backward(DATA, "cross_entropy").result(timeout=TIMEOUT)
    again.optim_step(adam()).result(timeout=TIMEOUT)


def test_a_killed_sampler_comes_back_with_the_weights_it_had(
    faulty: TestStack, other_service: ServiceClient, state: str
) -> None:
    run = other_service.create_training_client_from_state(state).result(timeout=120)
    tokens = sequences(2, seed=194)
    sampler = run.save_weights_and_get_sampling_client().result(timeout=120)
    then = logprobs(run, tokens)
    assert largest_difference(then, prompt_logprobs(sampler, tokens)) < 1e-4
    worker = faulty.worker("sampler", session_id=session_of(run))
    pids = {process.pid for process in faulty.processes_of(worker)}

    os.kill(worker["pid"], signal.SIGKILL)
    wait_until(gone(faulty, pids), what="nothing of the old engine is left")
    assert largest_difference(then, prompt_logprobs(sampler, tokens)) < 1e-4
    again = faulty.worker("sampler", session_id=session_of(run))
    assert again["pid"] != worker["pid"]
    train(run, seed=195)
    newer = run.save_weights_and_get_sampling_client().result(timeout=120)
    assert largest_difference(logprobs(run, tokens), prompt_logprobs(newer, tokens)) < 1e-4
    assert faulty.run(run)["state"] == "ready", "the run did not notice"


def test_a_killed_gateway_leaves_no_process_and_the_next_one_tells_what_was_lost(
    models: dict[str, Path], tmp_path: Path
) -> None:
    with running(tmp_path, models=models) as stack:
        client = PlainClient(stack.stack.endpoint)
        session_id = client.create_session()
        run_id = client.create_model(session_id, f"{TIED}:full")
        saved = client.post("save_weights", {"model_id": run_id, "seq_id": 1, "path": "kept"})
        path = client.retrieve(saved).json["path"]
        done = client.forward_backward(message(run_id, 2, [1, 2, 3])).json()["request_id"]
        result = client.retrieve(done)
        trainer = stack.worker("trainer", session_id=session_id)
        os.kill(trainer["pid"], signal.SIGSTOP)  # so that the next operation does not end
        lost = client.forward_backward(message(run_id, 3, [1, 2, 3])).json()["request_id"]
        assert len(stack.processes()) >= 3

        stack.stack.process.kill()
        wait_until(lambda: not stack.processes(), what="the gateway and its workers are gone")
        with pytest.raises(httpx.HTTPError):
            client.heartbeat(session_id)

    with running(tmp_path, models=models) as stack:
        client = PlainClient(stack.stack.endpoint)
        failed = client.failure(lost)
        assert (failed.type, failed.category) == ("gateway_restarted", "server")
        assert client.retrieve(done) == result, "what had ended is still answered"
        assert client.heartbeat(session_id).is_success, "the session has outlived the gateway"
        refused = client.forward_backward(message(run_id, 4, [1, 2, 3]))
        told = (
            client.failure(refused.json()["request_id"])
            if refused.is_success
            else refusal_of(refused)
        )
        assert told.type == "gateway_restarted"
        body = {"session_id": session_id, "model_seq_id": 1, "path": path, "optimizer": True}
        client.retrieve(client.post("load_weights", body))
        again = client.forward_backward(message(f"{session_id}:train:1", 1, [1, 2, 3]))
        found = client.retrieve(again.json()["request_id"])
        assert (found.logprobs == result.logprobs).all()
