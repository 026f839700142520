"""Two engines behind one sampling session. One is killed."""

from __future__ import annotations

import json
import os
import signal
from concurrent.futures import Future
from pathlib import Path

import pytest
from tinker import SamplingClient, types
from typer.testing import CliRunner

from tandem.cli.main import app
from tests.support.sdk import SOON, TIMEOUT, train
from tests.support.stacks import TIED, TestStack, running, write_qwen
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

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
        assert len([each for each in stack.status()["workers"] if each["kind"] == "sampler"]) == 1
