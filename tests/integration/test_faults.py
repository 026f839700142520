"""kill -9 of each process, a full disk, the client's errors, and work afterwards.

Most tests share a stack of two ranks, and begin with the last test's state."""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from tinker import SamplingClient, ServiceClient, TrainingClient, types

from tests.support.plain_http import PlainClient, message
from tests.support.processes import Process, fill, small_disk
from tests.support.sdk import (
    SOON,
    TIMEOUT,
    adam,
    largest_difference,
    logprobs,
    prompt_logprobs,
    refusal,
    sequences,
    supervised,
    train,
)
from tests.support.stacks import MAX_LENGTH, TIED, TestStack, running, session_of
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

DATA = [supervised(tokens) for tokens in sequences(4, seed=191)]


@dataclass
class Faulty:
    """A stack, its session and newest run. `undisturbed`: the weights four steps after `state`."""

    stack: TestStack
    service: ServiceClient
    state: str
    undisturbed: dict[str, np.ndarray]
    run: TrainingClient
    has_own_disk: bool

    def create_again(self) -> TrainingClient:
        creating = self.service.create_training_client_from_state_with_optimizer(self.state)
        self.run = creating.result(timeout=240)
        return self.run


@pytest.fixture(scope="module")
def faulty(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Faulty]:
    data_dir = tmp_path_factory.mktemp("faults")
    settings = {
        "trainer_ranks": "2",
        "min_free_bytes": "0",
        "recovery_share": "1",  # a snapshot as often as possible
    }
    with (
        small_disk(data_dir / "weights", megabytes=8) as mounted,
        running(data_dir, models=models, settings=settings) as stack,
        stack.service() as service,
    ):
        run = service.create_lora_training_client(f"{TIED}:full").result(timeout=240)
        train(run, seed=192)
        state = run.save_state("before").result(timeout=240).path
        for future in train_on(run, 1, 2, 3, 4):
            future.result(timeout=TIMEOUT)
        yield Faulty(stack, service, state, weights_of(stack, run), run, mounted)


def trainer_of(stack: TestStack, run: TrainingClient) -> dict:
    number = stack.run(run)["id"]
    return next(
        worker
        for worker in stack.status()["workers"]
        if worker["kind"] == "trainer" and worker.get("run_id") == number
    )


def rank(stack: TestStack, worker: dict, number: int) -> Process:
    """A rank's process. Rank 0 leads the group."""
    for process in stack.processes_of(worker):
        if (process.pid != process.group) == (number > 0):
            return process
    raise AssertionError(f"no rank {number} among {stack.processes_of(worker)}")


def gone(stack: TestStack, pids: set[int]) -> Callable[[], bool]:
    return lambda: not pids & {process.pid for process in stack.processes()}


def train_on(run: TrainingClient, *numbers: int) -> list[object]:
    """Send a batch and a step for each number."""
    pending: list[object] = []
    for number in numbers:
        data = [supervised(tokens) for tokens in sequences(4, seed=1000 + number)]
        pending += [run.forward_backward(data, "cross_entropy"), run.optim_step(adam())]
    return pending


def drawn(sampler: SamplingClient, *, tokens: int) -> Future[types.SampleResponse]:
    params = types.SamplingParams(max_tokens=tokens, seed=11, stop=[])
    return sampler.sample(types.ModelInput.from_ints([5, 6, 7, 8]), 4, params)


def tokens_of(samples: Future[types.SampleResponse]) -> list[list[int]]:
    return [each.tokens for each in samples.result(timeout=TIMEOUT).sequences]


def weights_of(stack: TestStack, run: TrainingClient) -> dict[str, np.ndarray]:
    run.save_weights_for_sampler(f"at-{uuid.uuid4().hex[:8]}").result(timeout=TIMEOUT)
    return stack.published(run)


@pytest.mark.parametrize("number", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_a_killed_rank_costs_a_pause_and_the_weights_are_the_undisturbed_ones(
    faulty: Faulty, number: int
) -> None:
    stack, expected = faulty.stack, faulty.undisturbed
    run = faulty.create_again()
    for future in train_on(run, 1, 2):
        future.result(timeout=TIMEOUT)
    snapshots = stack.data_dir / "snapshots"
    wait_until(lambda: stack.run(run)["snapshot_step"] > 0, what="there is a snapshot")
    worker = trainer_of(stack, run)
    pids = {process.pid for process in stack.processes_of(worker)}
    victim = rank(stack, worker, number)

    os.kill(victim.pid, signal.SIGSTOP)  # it dies in the middle of an operation
    pending = train_on(run, 3, 4)
    wait_until(lambda: stack.run(run)["queued"] >= 2, what="the operations are under way")
    os.kill(victim.pid, signal.SIGKILL)

    wait_until(lambda: stack.run(run)["restored"] == 1, what="the run is restored")
    for future in pending:
        future.result(timeout=TIMEOUT)
    assert stack.run(run)["restored"] == 1
    assert not pids & {process.pid for process in stack.processes()}
    found = weights_of(stack, run)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_array_equal(found[name], tensor, err_msg=name)
    assert any(snapshots.iterdir())


def test_a_killed_sampler_comes_back_with_the_weights_it_had(faulty: Faulty) -> None:
    stack, run = faulty.stack, faulty.run
    tokens = sequences(2, seed=194)
    sampler = run.save_weights_and_get_sampling_client().result(timeout=240)
    then = logprobs(run, tokens)
    assert largest_difference(then, prompt_logprobs(sampler, tokens)) < 1e-4
    worker = stack.worker("sampler", session_id=session_of(run))
    pids = {process.pid for process in stack.processes_of(worker)}

    os.kill(worker["pid"], signal.SIGKILL)
    wait_until(gone(stack, pids), what="nothing of the old engine is left")
    assert largest_difference(then, prompt_logprobs(sampler, tokens)) < 1e-4
    again = stack.worker("sampler", session_id=session_of(run))
    assert again["pid"] != worker["pid"]
    train(run, seed=195)
    newer = run.save_weights_and_get_sampling_client().result(timeout=240)
    assert largest_difference(logprobs(run, tokens), prompt_logprobs(newer, tokens)) < 1e-4
    assert stack.run(run)["state"] == "ready", "the run did not notice"


def test_a_publish_on_a_full_disk_fails_and_the_old_version_goes_on_serving(faulty: Faulty) -> None:
    if not faulty.has_own_disk:
        pytest.skip("a small disk can be made only where mounting is allowed")
    run, weights = faulty.run, faulty.stack.data_dir / "weights"
    tokens = sequences(3, seed=201)
    train(run, seed=202)
    old = run.save_weights_and_get_sampling_client().result(timeout=240)
    then = logprobs(run, tokens)
    train(run, seed=203)
    now = logprobs(run, tokens)
    fill(weights / "filler")

    refused = refusal(lambda: run.save_weights_and_get_sampling_client().result(timeout=SOON))
    assert (refused.type, refused.category) == ("storage_full", "server"), refused
    assert largest_difference(then, prompt_logprobs(old, tokens)) < 1e-4
    assert largest_difference(now, logprobs(run, tokens)) == 0, "the run lives on"
    assert not list(weights.glob("*/.partial-*"))

    (weights / "filler").unlink()
    new = run.save_weights_and_get_sampling_client().result(timeout=240)
    assert largest_difference(now, prompt_logprobs(new, tokens)) < 1e-4
    assert largest_difference(then, prompt_logprobs(old, tokens)) < 1e-4


def test_a_killed_gateway_is_replaced_and_the_next_one_goes_on_with_its_runs(
    models: dict[str, Path], tmp_path: Path
) -> None:
    with running(tmp_path, models=models) as stack:
        client = PlainClient(stack.stack.endpoint)
        session_id = client.create_session()
        run_id = client.create_model(session_id, f"{TIED}:full")
        done = client.forward_backward(message(run_id, 1, [1, 2, 3])).json()["request_id"]
        result = client.retrieve(done)
        trainer = stack.worker("trainer", session_id=session_id)
        os.kill(trainer["pid"], signal.SIGSTOP)  # the next operation does not end
        under_way = client.forward_backward(message(run_id, 2, [1, 2, 3])).json()["request_id"]
        pids = {process.pid for process in stack.processes_of(trainer)}
        assert pids

        killed = stack.stack.endpoint
        stack.stack.process.kill()
        wait_until(lambda: stack.stack.endpoint.pid != killed.pid, what="there is another gateway")
        assert stack.stack.endpoint.url == killed.url

        assert client.retrieve(done) == result, "what had ended is still answered"
        assert client.heartbeat(session_id).is_success, "the session has outlived the gateway"
        assert (client.retrieve(under_way).logprobs == result.logprobs).all()
        assert gone(stack, pids)(), "a frozen trainer is of no use to the next gateway"
        step = {"model_id": run_id, "seq_id": 3, "adam_params": {"learning_rate": 1e-2}}
        client.retrieve(client.post("optim_step", step))
        later = client.forward_backward(message(run_id, 4, [1, 2, 3])).json()["request_id"]
        assert (client.retrieve(later).logprobs != result.logprobs).any()


@pytest.mark.nightly
def test_a_trainer_outlives_its_gateway_and_applies_each_operation_once(
    models: dict[str, Path], tmp_path: Path
) -> None:
    with running(tmp_path, models=models) as stack:
        client = PlainClient(stack.stack.endpoint)
        session_id = client.create_session()

        def train(run_id: str, *numbers: int) -> None:
            for number in numbers:
                client.forward_backward(message(run_id, 2 * number - 1, [1, 2, 3 + number]))
                step = {"model_id": run_id, "seq_id": 2 * number, "adam_params": {}}
                client.post("optim_step", step)

        disturbed = client.create_model(session_id, f"{TIED}:full")
        train(disturbed, 1)
        client.retrieve(f"{disturbed}:2")
        trainer = stack.worker("trainer", session_id=session_id)
        killed = stack.stack.endpoint
        train(disturbed, 2, 3)  # without waiting for results
        stack.stack.process.kill()
        wait_until(lambda: stack.stack.endpoint.pid != killed.pid, what="there is another gateway")
        train(disturbed, 4)
        results = [client.retrieve(f"{disturbed}:{seq}") for seq in (3, 5, 7)]
        assert stack.worker("trainer", session_id=session_id)["pid"] == trainer["pid"]

        undisturbed = client.create_model(session_id, f"{TIED}:full", number=1)
        train(undisturbed, 1, 2, 3, 4)
        for seq, result in zip((3, 5, 7), results, strict=True):
            expected = client.retrieve(f"{undisturbed}:{seq}")
            assert (result.logprobs == expected.logprobs).all()
        (row,) = [each for each in stack.status()["runs"] if each["id"] == disturbed]
        assert row["restored"] == 0


@pytest.mark.nightly
def test_an_engine_outlives_its_gateways_and_gives_the_same_tokens(
    models: dict[str, Path], tmp_path: Path
) -> None:
    with running(tmp_path, models=models) as stack, stack.service() as service:
        run = service.create_lora_training_client(f"{TIED}:full").result(timeout=240)
        train(run, seed=207)
        sampler = run.save_weights_and_get_sampling_client().result(timeout=240)
        asked = [8, MAX_LENGTH - 4]
        expected = [tokens_of(drawn(sampler, tokens=most)) for most in asked]
        engine = stack.worker("sampler", session_id=session_of(run))["pid"]
        for number in (signal.SIGKILL, signal.SIGTERM):
            under_way, gateway = drawn(sampler, tokens=MAX_LENGTH - 4), stack.stack.endpoint
            stack.stack.process.send_signal(number)
            wait_until(lambda old=gateway: stack.stack.endpoint.pid != old.pid)
            again = [tokens_of(each) for each in (drawn(sampler, tokens=8), under_way)]
            assert again == expected
        train(run, seed=208)
        newer = run.save_weights_and_get_sampling_client().result(timeout=240)
        tokens = sequences(2, seed=209)
        assert largest_difference(logprobs(run, tokens), prompt_logprobs(newer, tokens)) < 1e-4
        assert stack.worker("sampler", session_id=session_of(run))["pid"] == engine


@pytest.mark.nightly
def test_an_engine_that_is_killed_beside_its_sampler_costs_no_sample(
    models: dict[str, Path], tmp_path: Path
) -> None:
    settings = {"sampler_engine_process": "on"}
    with running(tmp_path, models=models, settings=settings) as stack, stack.service() as service:
        run = service.create_lora_training_client(f"{TIED}:full").result(timeout=240)
        sampler = run.save_weights_and_get_sampling_client().result(timeout=240)
        expected = tokens_of(drawn(sampler, tokens=MAX_LENGTH - 4))
        worker = stack.worker("sampler", session_id=session_of(run))
        engine, *_ = [each for each in stack.processes_of(worker) if each.pid != worker["pid"]]
        under_way = drawn(sampler, tokens=MAX_LENGTH - 4)
        os.kill(engine.pid, signal.SIGKILL)
        assert tokens_of(under_way) == expected
        assert stack.worker("sampler", session_id=session_of(run))["pid"] != worker["pid"]
        train(run, seed=210)
        tokens = sequences(2, seed=211)
        newer = run.save_weights_and_get_sampling_client().result(timeout=240)
        assert largest_difference(logprobs(run, tokens), prompt_logprobs(newer, tokens)) < 1e-4


def test_a_killed_agent_takes_its_workers_along_and_the_run_is_restored(
    models: dict[str, Path], tmp_path: Path
) -> None:
    with running(tmp_path, models=models) as stack, stack.service() as service:
        run = service.create_lora_training_client(f"{TIED}:full").result(timeout=240)
        train(run, seed=205)
        tokens = sequences(2, seed=206)
        expected = logprobs(run, tokens)
        pids = {process.pid for process in stack.processes_of(trainer_of(stack, run))}
        assert pids
        stack.stack.agent_process.kill()
        wait_until(gone(stack, pids), what="its workers have ended with it")
        assert largest_difference(expected, logprobs(run, tokens)) == 0
        assert stack.run(run)["restored"] == 1
