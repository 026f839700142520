"""LoRA runs: adapters give the trainer's numbers, and runs stay apart."""

from __future__ import annotations

from pathlib import Path

import pytest
from tinker import SamplingClient, TrainingClient, types

from tests.support.plain_model import load, plain_logprobs
from tests.support.sdk import (
    TIMEOUT,
    largest_difference,
    logprobs,
    prompt_logprobs,
    sequences,
    train,
)
from tests.support.stacks import TIED, TestStack

TOLERANCE = 1e-4
TOKENS = sequences(5, seed=71)


def serve(training: TrainingClient, kind: types.SamplingClientKind = "snapshot") -> SamplingClient:
    return training.save_weights_and_get_sampling_client(kind=kind).result(timeout=TIMEOUT)


@pytest.mark.nightly
def test_runs_in_one_session_do_not_touch_each_other(
    stack: TestStack, models: dict[str, Path]
) -> None:
    """To the last bit in the trainers. All runs share one engine."""
    with stack.service() as together:
        # An engine that starts with the largest rank serves all.
        wide = together.create_lora_training_client(TIED, rank=12, seed=3).result(timeout=240)
        narrow = together.create_lora_training_client(TIED, rank=4, seed=7)
        full = together.create_lora_training_client(f"{TIED}:full")
        runs = {"wide": wide, "narrow": narrow.result(timeout=240), "full": full.result(240)}
        before = {name: logprobs(training, TOKENS) for name, training in runs.items()}
        samplers = {name: serve(training) for name, training in runs.items()}
        for moved in runs:
            train(runs[moved], seed=79)
            now = {name: logprobs(training, TOKENS) for name, training in runs.items()}
            for name in runs:
                difference = largest_difference(now[name], before[name])
                assert difference > 100 * TOLERANCE if name == moved else difference == 0.0
            samplers[moved] = serve(runs[moved])
            for name, sampler in samplers.items():
                assert largest_difference(prompt_logprobs(sampler, TOKENS), now[name]) < TOLERANCE
            before = now
        of_base = together.create_sampling_client(base_model=TIED).result(timeout=TIMEOUT)
        served = prompt_logprobs(of_base, TOKENS)
        assert largest_difference(served, plain_logprobs(load(models[TIED]), TOKENS)) < TOLERANCE


@pytest.mark.nightly
def test_adapters_of_a_model_whose_matrices_two_ranks_divide_are_served_as_trained(
    stack: TestStack,
) -> None:
    asks = {"tandem.ranks": "2", "tandem.tensor_parallel": "2"}
    with stack.service(user_metadata=asks) as service:
        training = service.create_lora_training_client(TIED, rank=8, seed=3).result(timeout=240)
        before = logprobs(training, TOKENS)
        train(training, seed=79)
        now = logprobs(training, TOKENS)
        assert largest_difference(now, before) > 100 * TOLERANCE
        assert largest_difference(prompt_logprobs(serve(training), TOKENS), now) < TOLERANCE
