"""Weights published as deltas, in bfloat16."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from tinker import SamplingClient, TrainingClient

from tandem.weights import Manifest
from tests.support.sdk import SOON, TIMEOUT, Floats, prompt_logprobs, sequences, train
from tests.support.stacks import TIED, TestStack, running, session_of, write_qwen
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

TOKENS = sequences(2, seed=5)
SETTINGS = {
    "trainer_dtype": "bfloat16",
    "sampler_dtype": "bfloat16",
    "delta_versions": "auto",
    "sampler_idle_ttl": "1",
}


def saved(run: TrainingClient) -> SamplingClient:
    return run.save_weights_and_get_sampling_client().result(timeout=4 * SOON)


def manifest(stack: TestStack, run: TrainingClient) -> Manifest:
    return Manifest.model_validate_json((stack.newest_version(run) / "manifest.json").read_bytes())


def logprobs(sampler: SamplingClient) -> list[list[float]]:
    found: list[Floats] = prompt_logprobs(sampler, TOKENS)
    return [each.tolist() for each in found]


@pytest.mark.timeout(600)
def test_a_delta_outlives_its_engine_and_what_it_is_a_delta_of_goes_after_it(
    tmp_path: Path,
):
    model = write_qwen(tmp_path / "model", seed=3)
    with (
        running(tmp_path, models={TIED: model}, settings=SETTINGS) as stack,
        stack.service() as service,
    ):
        run = service.create_lora_training_client(f"{TIED}:full").result(timeout=240)
        before = logprobs(saved(run))
        whole, base = manifest(stack, run), stack.newest_version(run)
        assert not whole.delta_of

        train(run, seed=1, steps=1, rate=1e-6)
        sampler = saved(run)
        delta = manifest(stack, run)
        assert delta.delta_of == whole.version
        assert delta.written_bytes < delta.bytes == whole.bytes
        served = logprobs(sampler)
        assert served != before
        os.killpg(stack.worker("sampler", session_id=session_of(run))["pid"], signal.SIGKILL)
        assert logprobs(sampler) == served, "by an engine that was started again"

        train(run, seed=2, steps=1, rate=1e-6)
        sampler = saved(run)
        assert manifest(stack, run).delta_of == whole.version
        logprobs(sampler)
        assert base.is_dir(), "a delta of it is served"

        run.save_weights_for_sampler("named").result(timeout=TIMEOUT)
        named = manifest(stack, run)
        assert not named.delta_of, "what has a name is whole"
        train(run, seed=3, steps=1, rate=1e-6)
        sampler = saved(run)
        assert manifest(stack, run).delta_of == named.version
        wait_until(lambda: not base.exists(), what="nothing is a delta of it any more")
        logprobs(sampler)
