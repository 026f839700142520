"""Several engines of one sampler. They come, go, die, and refuse versions."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import pytest
from tinker import APIFuture, SamplingClient, TrainingClient, types
from typer.testing import CliRunner

from tandem.cli.main import app
from tests.support.sdk import SOON, TIMEOUT, train
from tests.support.stacks import TIED, TestStack, running, write_qwen
from tests.support.waiting import wait_until

pytestmark = pytest.mark.nightly

PROMPTS = [[5 + number, 6, 7, 8] for number in range(24)]
TOKENS = 240


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen(tmp_path_factory.mktemp("model") / "tied", seed=3)


def ask(sampler: SamplingClient) -> list[Future[types.SampleResponse]]:
    params = types.SamplingParams(max_tokens=TOKENS, seed=11, stop=[])
    prompts = map(types.ModelInput.from_ints, PROMPTS)
    return [sampler.sample(prompt, 2, params).future() for prompt in prompts]


def answers(asked: list[Future[types.SampleResponse]]) -> list[list[tuple[list[int], list[float]]]]:
    found = [each.result(timeout=4 * SOON).sequences for each in asked]
    return [[(each.tokens, each.logprobs) for each in sequences] for sequences in found]


def engines(stack: TestStack) -> list[dict]:
    return stack.status()["samplers"]


def busy(stack: TestStack) -> bool:
    found = [each for each in engines(stack) if each["state"] == "ready" and each["under_way"]]
    return len(found) == 2


def ask_both(stack: TestStack, sampler: SamplingClient) -> list[Future[types.SampleResponse]]:
    """Ask until both engines are seen at work."""
    for _ in range(5):
        asked = ask(sampler)
        wait_until(
            lambda asked=asked: busy(stack) or all(each.done() for each in asked),
            what="both engines have something to do",
        )
        if not all(each.done() for each in asked):
            return asked
    raise AssertionError("it was never seen that both engines have something to do")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [TIED, f"{TIED}:full"], ids=["adapters", "all weights"])
def test_no_sample_is_lost_with_an_engine_and_all_are_as_from_one(name, model, tmp_path):
    with running(tmp_path, models={TIED: model}) as stack, stack.service() as alone:
        with stack.service(user_metadata={"tandem.replicas": "2"}) as service:
            run = service.create_lora_training_client(name, rank=8).result(timeout=240)
            train(run, seed=7)
            path = run.save_weights_for_sampler("x").result(timeout=TIMEOUT).path
            sampler = run.save_weights_and_get_sampling_client().result(timeout=4 * SOON)
            assert answers(ask(sampler)) == answers(ask(sampler))
            wait_until(lambda: sum(each["state"] == "ready" for each in engines(stack)) == 2)
            undisturbed = answers(ask(sampler))
            asked = ask_both(stack, sampler)
            victim = engines(stack)[0]["worker"]
            (worker,) = [w for w in stack.status()["workers"] if w["id"] == victim]
            os.killpg(worker["pid"], signal.SIGKILL)
            assert answers(asked) == undisturbed
            train(run, seed=8, steps=1)
            newer = run.save_weights_and_get_sampling_client().result(timeout=4 * SOON)
            later = answers(ask(newer))
            assert later != undisturbed
            wait_until(lambda: sum(each["state"] == "ready" for each in engines(stack)) == 2)
            assert answers(ask(newer)) == later, "also by the engine that was started again"
        wait_until(lambda: not engines(stack), what="both engines have ended with their session")
        by_one = alone.create_sampling_client(model_path=path).result()
        assert answers(ask(by_one)) == undisturbed
        assert len(engines(stack)) == 1


def scaled(stack: TestStack, session: str, replicas: int) -> dict:
    directory = ["--data-dir", str(stack.data_dir)]
    words = ["scale", session, "--replicas", str(replicas), "--json", *directory]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    return json.loads(done.output)


def sampler_workers(stack: TestStack) -> list[dict]:
    return [each for each in stack.status()["workers"] if each["kind"] == "sampler"]


@pytest.mark.timeout(600)
def test_engines_come_and_go_while_one_samples_without_a_trace_in_the_samples(model, tmp_path):
    with running(tmp_path, models={TIED: model}) as stack, stack.service() as service:
        sampler = service.create_sampling_client(base_model=TIED).result(timeout=4 * SOON)
        undisturbed = answers(ask(sampler))
        (session,) = (each["id"] for each in stack.status()["sessions"])
        asked = ask(sampler)
        assert scaled(stack, session, 2)["replicas"] == 2
        assert answers(asked) == undisturbed
        wait_until(lambda: sum(each["state"] == "ready" for each in engines(stack)) == 2)
        asked = ask_both(stack, sampler)
        assert scaled(stack, session, 1)["leaving"] == 1
        assert answers(asked) == undisturbed
        wait_until(lambda: len(engines(stack)) == 1, what="the other engine has ended")
        assert len(sampler_workers(stack)) == 1


@pytest.mark.timeout(900)
def test_a_queue_brings_a_second_engine_and_without_samples_none_is_left(model, tmp_path):
    allowed = {"tandem.min_replicas": "0", "tandem.max_replicas": "2"}
    with (
        running(
            tmp_path,
            models={TIED: model},
            settings={"sampler_max_num_seqs": "8"},
            gateway="tests.support.hasty_gateway",
        ) as stack,
        stack.service(user_metadata=allowed) as service,
    ):
        sampler = service.create_sampling_client(base_model=TIED).result(timeout=4 * SOON)
        one = sampler.sample(types.ModelInput.from_ints(PROMPTS[0]), 1, types.SamplingParams())
        one.result(timeout=4 * SOON)
        assert len(engines(stack)) == 1
        asked: list[list[Future[types.SampleResponse]]] = []

        def both_work_on_a_queue() -> bool:
            if sum(not all(each.done() for each in asks) for asks in asked) < 2:
                asked.append(ask(sampler))
            return busy(stack)

        wait_until(both_work_on_a_queue, timeout=4 * SOON)
        first, *others = map(answers, asked)
        assert all(each == first for each in others)
        wait_until(lambda: not sampler_workers(stack), what="no engine is left")
        assert [each["state"] for each in engines(stack)] == ["idle"]
        assert answers(ask(sampler)) == first


# --- One of two engines refuses a version ---------------------------------------------------------


@dataclass(frozen=True)
class Pair:
    """A run with two engines."""

    stack: TestStack
    run: TrainingClient

    def shown(self) -> dict:
        with self.stack.stack.client() as client:
            return client.get(f"samplers/{self.run.model_id}").raise_for_status().json()

    def version(self) -> str:
        return self.stack.run(self.run)["weight_version"]

    def state(self) -> str:
        """The state of the newest version, "" if no engine has it."""
        states = {each["name"]: each["state"] for each in self.shown()["versions"]}
        return states.get(self.version(), "")

    def is_live(self) -> bool:
        return self.shown()["serving"] == 2 and self.state() == "live"

    def engine(self, replica: int) -> dict:
        return self.shown()["engines"][replica]

    def process(self, replica: int) -> int:
        """The process group of an engine."""
        worker = self.engine(replica)["worker"]
        (found,) = [each for each in self.stack.status()["workers"] if each["id"] == worker]
        return found["pid"]

    def begin_save(self, *frozen: int) -> APIFuture[SamplingClient]:
        """Freeze these process groups, and return when a new version is published."""
        before = self.version()
        train(self.run, seed=9, steps=1)
        for process in frozen:
            os.killpg(process, signal.SIGSTOP)
        saving = self.run.save_weights_and_get_sampling_client()
        wait_until(lambda: self.version() != before, what="the version is published")
        return saving

    def answers(self, sampler: SamplingClient) -> list[list[tuple[list[int], list[float]]]]:
        """Answers of the newest version."""
        asked = ask(sampler)
        found = answers(asked)
        ids = [each.result().sequences[0].sequence_id.rpartition(":")[0] for each in asked]
        with self.stack.stack.client() as client:
            told = client.get("samples/versions", params={"ids": ",".join(ids)})
        versions = {each["weight_version"] for each in told.raise_for_status().json()["requests"]}
        assert versions == {self.version()}
        return found


@pytest.fixture(scope="module")
def pair(model, tmp_path_factory) -> Iterator[Pair]:
    """The engines have 30 s for a load."""
    with (
        running(
            tmp_path_factory.mktemp("pair"),
            models={TIED: model},
            settings={"operation_timeout": "30", "trainer_ranks": "1"},
        ) as stack,
        stack.service(user_metadata={"tandem.replicas": "2"}) as service,
    ):
        run = service.create_lora_training_client(f"{TIED}:full").result(timeout=240)
        pair = Pair(stack, run)
        pair.begin_save().result(timeout=4 * SOON)
        yield pair


@pytest.mark.timeout(600)
@pytest.mark.parametrize("replica", [0, 1])
def test_a_version_of_damaged_files_is_degraded_until_the_engine_starts_again(pair, replica):
    wait_until(pair.is_live)
    process, before = pair.process(replica), pair.version()
    saving = pair.begin_save(process)
    other = pair.engine(1 - replica)["worker"]
    wait_until(lambda: has_loaded(pair, other), what="the other engine has the version")
    (file,) = pair.stack.newest_version(pair.run).glob("*.safetensors")
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    os.killpg(process, signal.SIGCONT)
    sampler = saving.result(timeout=SOON)
    assert pair.state() == "degraded"
    expected = pair.answers(sampler)
    refusing = pair.engine(replica)
    assert "model.safetensors" in refusing["refused"][pair.version()]
    assert refusing["versions"] == [before]
    assert pair.engine(1 - replica)["worker"] == other
    assert not pair.engine(1 - replica)["refused"]
    file.write_bytes(content)
    os.killpg(process, signal.SIGKILL)
    wait_until(lambda: pair.engine(replica)["worker"] != refusing["worker"])
    assert pair.answers(sampler) == expected
    wait_until(pair.is_live)
    assert pair.answers(sampler) == expected


@pytest.mark.timeout(600)
@pytest.mark.parametrize("replica", [0, 1])
def test_a_version_that_a_frozen_engine_did_not_load_is_live_when_it_goes_on(pair, replica):
    wait_until(pair.is_live)
    process = pair.process(replica)
    try:
        sampler = pair.begin_save(process).result(timeout=SOON)
        assert pair.state() == "degraded"
        refused = pair.engine(replica)["refused"][pair.version()]
        assert "did not load the weights within 30 s" in refused
        expected = pair.answers(sampler)
    finally:
        os.killpg(process, signal.SIGCONT)
    wait_until(pair.is_live)
    assert pair.process(replica) == process, "it did not start again"
    assert pair.answers(sampler) == expected


def has_loaded(pair: Pair, worker: str) -> bool:
    """Whether an engine's log says that it has the newest version."""
    lines = (pair.stack.data_dir / "logs" / f"{worker}.log").read_text().splitlines()
    return any('"loaded"' in line and pair.version() in line for line in lines)
