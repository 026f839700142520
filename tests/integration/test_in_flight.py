"""A client that samples in flight, beside one that does not, while the run is trained on."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np
import pytest
from tinker import SamplingClient, ServiceClient, TrainingClient, types

from tandem.rl import staleness
from tests.support.sdk import SOON, Floats, train
from tests.support.stacks import TIED, TestStack

PROMPT = [5, 6, 7, 8]


def ask(sampler: SamplingClient, *, n: int, tokens: int) -> Future[types.SampleResponse]:
    params = types.SamplingParams(max_tokens=tokens, stop=[])
    return sampler.sample(types.ModelInput.from_ints(PROMPT), n, params)


def scored(sampler: SamplingClient, tokens: Sequence[int]) -> Floats:
    """What a client's weights make of sampled tokens [tokens]."""
    whole = types.ModelInput.from_ints([*PROMPT, *tokens])
    return np.array(sampler.compute_logprobs(whole).result(timeout=SOON)[len(PROMPT) :], np.float32)


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
    fixed = run.save_weights_and_get_sampling_client().result(timeout=SOON)
    train(run, seed=302, steps=1)
    frozen = ask(fixed, n=2, tokens=3).result(timeout=SOON)
    ask(following, n=1, tokens=1).result(timeout=SOON)  # the engine has its weights again
    asked = ask(following, n=48, tokens=220)
    ask(following, n=1, tokens=1).result(
        timeout=SOON
    )  # it has begun before this one, for which there is room
    run.save_weights_and_get_sampling_client(kind="inflight").result(timeout=2 * SOON)
    newest = run.save_weights_and_get_sampling_client().result(timeout=2 * SOON)

    sequences = asked.result(timeout=4 * SOON).sequences
    request_id = sequences[0].sequence_id.rpartition(":")[0]
    with stack.stack.client() as client:
        told = client.get(f"samples/{request_id}/versions").raise_for_status().json()["samples"]
    assert len(told) == len(sequences) == 48
    for sequence, runs in zip(sequences[:4], told, strict=False):
        behind = staleness(runs, step=4)
        assert [each["step"] for each in runs] == [3, 4] and set(behind.tolist()) == {0, 1}
        by_old, by_new = scored(fixed, sequence.tokens), scored(newest, sequence.tokens)
        expected = np.where(behind == 1, by_old, by_new)
        assert np.abs(expected - sequence.logprobs).max() < 1e-4
        assert np.abs(by_old - by_new).max() > 0.01, "the step changed nothing that shows"
    for sequence in frozen.sequences:
        assert np.abs(scored(fixed, sequence.tokens) - sequence.logprobs).max() < 1e-4
