"""An in-flight client and a frozen one sample during training."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import NamedTuple

import numpy as np
import pytest
from tinker import SamplingClient, ServiceClient, TrainingClient, types

from tandem.rl import staleness
from tests.support.sdk import SOON, TIMEOUT, Floats, train
from tests.support.stacks import TIED, TestStack

PROMPT = [5, 6, 7, 8]
ATTEMPTS = 5
"""Each asks for twice as many samples, until a save finds some unfinished."""


def ask(sampler: SamplingClient, *, n: int, tokens: int) -> Future[types.SampleResponse]:
    params = types.SamplingParams(max_tokens=tokens, stop=[])
    return sampler.sample(types.ModelInput.from_ints(PROMPT), n, params)


def scored(sampler: SamplingClient, tokens: Sequence[int]) -> Floats:
    """Logprobs of sampled tokens [tokens] with a client's weights."""
    whole = types.ModelInput.from_ints([*PROMPT, *tokens])
    return np.array(
        sampler.compute_logprobs(whole).result(timeout=TIMEOUT)[len(PROMPT) :], np.float32
    )


class Told(NamedTuple):
    sequence: types.SampledSequence
    runs: list[dict]


def told_of(stack: TestStack, answer: types.SampleResponse) -> list[Told]:
    request_id = answer.sequences[0].sequence_id.rpartition(":")[0]
    with stack.stack.client() as client:
        told = client.get(f"samples/{request_id}/versions").raise_for_status().json()["samples"]
    return [Told(*each) for each in zip(answer.sequences, told, strict=True)]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(f"{TIED}:full", id="all weights"),
        pytest.param(TIED, id="adapters", marks=pytest.mark.nightly),
    ],
)
def test_an_answer_goes_on_with_the_next_save_and_each_token_is_of_the_version_that_it_says(
    name: str, stack: TestStack, service: ServiceClient
) -> None:
    run: TrainingClient = service.create_lora_training_client(name, rank=8).result(timeout=240)
    train(run, seed=301)
    following = run.save_weights_and_get_sampling_client(kind="inflight").result(timeout=4 * SOON)
    first = before = run.save_weights_and_get_sampling_client().result(timeout=TIMEOUT)
    carried: list[Told] = []
    for step in range(4, 4 + ATTEMPTS):
        train(run, seed=298 + step, steps=1)
        frozen = ask(first, n=2, tokens=3).result(timeout=TIMEOUT)
        ask(following, n=1, tokens=1).result(timeout=TIMEOUT)  # back to newer weights
        asked = [ask(following, n=48, tokens=220)]
        # There is room for both, so it has begun before this one.
        ask(following, n=1, tokens=1).result(timeout=TIMEOUT)
        asked += [ask(following, n=48, tokens=220) for _ in range(2 ** (step - 4) - 1)]
        run.save_weights_and_get_sampling_client(kind="inflight").result(timeout=TIMEOUT)
        newest = run.save_weights_and_get_sampling_client().result(timeout=4 * SOON)
        for answer in asked:
            told = told_of(stack, answer.result(timeout=4 * SOON))
            assert len(told) == 48
            carried += [each for each in told if len(each.runs) > 1]
        if carried:
            break
        before = newest  # all ended before the version came: ask for twice as many

    for sequence, runs in carried[:4]:
        behind = staleness(runs, step=step)
        assert [each["step"] for each in runs] == [step - 1, step]
        assert set(behind.tolist()) == {0, 1}
        by_old, by_new = scored(before, sequence.tokens), scored(newest, sequence.tokens)
        expected = np.where(behind == 1, by_old, by_new)
        assert np.abs(expected - sequence.logprobs).max() < 1e-4
        assert np.abs(by_old - by_new).max() > 0.01, "the step changed nothing that shows"
    assert carried, "each save came after all that was asked for before it"
    for sequence in frozen.sequences:
        assert np.abs(scored(first, sequence.tokens) - sequence.logprobs).max() < 1e-4
