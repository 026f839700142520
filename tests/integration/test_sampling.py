"""Samplers on the real stack: which weights they serve, and to whom, while others are busy."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tinker import APIFuture, SamplingClient, ServiceClient, TrainingClient, types

from tests.support.sdk import (
    TIMEOUT,
    Floats,
    largest_difference,
    logprobs,
    params,
    prompt_logprobs,
    sample,
    sequences,
    train,
)
from tests.support.stacks import MAX_LENGTH, TIED, TestStack
from tests.support.waiting import wait_until

TOLERANCE = 1e-4
TOKENS = sequences(5, seed=91)
PROMPT = types.ModelInput.from_ints([5, 6, 7, 8])


@pytest.fixture
def base_sampler(service: ServiceClient) -> SamplingClient:
    return service.create_sampling_client(base_model=TIED).result(timeout=TIMEOUT)


@pytest.fixture
def key_in_the_environment(stack: TestStack, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Where a client that was unpickled finds it."""
    monkeypatch.setenv("TINKER_API_KEY", stack.stack.endpoint.api_key)
    yield


def serve(training: TrainingClient, kind: types.SamplingClientKind = "snapshot") -> SamplingClient:
    return training.save_weights_and_get_sampling_client(kind=kind).result(timeout=TIMEOUT)


def test_a_snapshot_stays_and_inflight_samplers_follow_while_all_is_trained(
    run: TrainingClient,
) -> None:
    train(run, seed=92)
    snapshot, early = serve(run), serve(run, "inflight")
    frozen = logprobs(run, TOKENS)
    for seed in (93, 94):
        train(run, seed=seed)
        now = logprobs(run, TOKENS)
        assert largest_difference(now, frozen) > 100 * TOLERANCE, "the weights hardly moved"
        late = serve(run, "inflight")
        assert largest_difference(prompt_logprobs(early, TOKENS), now) < TOLERANCE
        assert largest_difference(prompt_logprobs(late, TOKENS), now) < TOLERANCE
        assert largest_difference(prompt_logprobs(snapshot, TOKENS), frozen) < TOLERANCE


def test_a_snapshot_that_is_sampled_from_during_training_gives_one_version_alone(
    run: TrainingClient,
) -> None:
    """Every sample that is under way while newer weights come has the snapshot's numbers."""
    train(run, seed=95)
    snapshot = serve(run)
    frozen = logprobs(run, TOKENS)
    futures = []
    for seed in (96, 97):
        futures += [snapshot.compute_logprobs(types.ModelInput.from_ints(t)) for t in TOKENS]
        train(run, seed=seed, steps=1)
        serve(run)
    served: list[Floats] = [
        np.array(future.result(timeout=TIMEOUT)[1:], np.float32) for future in futures
    ]
    assert largest_difference(served, frozen * 2) < TOLERANCE


def test_copies_of_a_client_sample_what_the_client_samples(
    base_sampler: SamplingClient, key_in_the_environment: None
) -> None:
    expected = [list(s.tokens) for s in sample(base_sampler, TOKENS[0], count=3, seed=4)]
    copies = [
        pickle.loads(pickle.dumps(base_sampler)),
        SamplingClient.from_sampler_handle(base_sampler.get_sampler_handle()),
    ]
    for copy in copies:
        assert [list(s.tokens) for s in sample(copy, TOKENS[0], count=3, seed=4)] == expected
    assert len({copy._cloned_sampler_id for copy in (base_sampler, *copies)}) == 3


def test_a_sample_that_is_given_up_leaves_the_engine_to_the_others(
    service: ServiceClient, base_sampler: SamplingClient, stack: TestStack
) -> None:
    def waiting() -> int:
        session_id = service.holder.get_session_id()
        samplers = stack.status()["samplers"]
        return sum(s["waiting"] for s in samplers if s["session_id"] == session_id)

    sample(base_sampler, TOKENS[0])
    long = params(tokens=MAX_LENGTH - 8, seed=1)
    given_up = [base_sampler.sample(PROMPT, 64, long).future() for _ in range(8)]
    wait_until(lambda: waiting() == 8, what="the samples are at the engine")
    for future in given_up:
        assert future.cancel()
    wait_until(lambda: waiting() == 0, what="the samples have left")
    assert len(sample(base_sampler, TOKENS[0])) == 1


def test_the_tokenizer_is_found_by_the_models_path(
    service: ServiceClient, models: dict[str, Path]
) -> None:
    """The SDK looks for a sampler's tokenizer where its base model's name leads."""
    sampler = service.create_sampling_client(base_model=str(models[TIED])).result(timeout=TIMEOUT)
    assert sampler.get_tokenizer().decode([13, 14]) == "*+"
    assert len(sample(sampler, TOKENS[0], tokens=3)[0].tokens) == 3


def test_many_clients_at_once_each_get_their_own_answers(
    run: TrainingClient, service: ServiceClient
) -> None:
    train(run, seed=98)
    samplers = [
        serve(run),
        service.create_sampling_client(base_model=TIED).result(timeout=TIMEOUT),
    ]
    asked = [(sampler, seed) for seed in range(6) for sampler in samplers]

    def ask(sampler: SamplingClient, seed: int) -> APIFuture[types.SampleResponse]:
        return sampler.sample(PROMPT, 2, params(tokens=10, seed=seed))

    alone = [_tokens(ask(*each).result(timeout=TIMEOUT)) for each in asked]
    futures = [ask(*each) for each in asked]
    assert [_tokens(future.result(timeout=TIMEOUT)) for future in futures] == alone
    assert len({str(tokens) for tokens in alone}) == len(asked)


@pytest.mark.parametrize("flagged", [False, True])
def test_more_samples_than_a_client_may_have_under_way_all_end(
    stack: TestStack, flagged: bool
) -> None:
    """With a poll for each, and with one for all."""
    with stack.service() as service:
        service.holder._client_config = service.holder.get_client_config().model_copy(
            update={"sample_use_retrieve_futures": flagged, "sample_max_concurrent_requests": 50}
        )
        sampler = service.create_sampling_client(base_model=TIED).result(timeout=TIMEOUT)
        futures = [
            sampler.sample(types.ModelInput.from_ints([5, 6, n % 100 + 3]), 1, params(seed=n))
            for n in range(300)
        ]
        answers = [future.result(timeout=TIMEOUT) for future in futures]
        assert all(len(answer.sequences[0].tokens) == 8 for answer in answers)


def _tokens(answer: types.SampleResponse) -> list[list[int]]:
    return [list(sequence.tokens) for sequence in answer.sequences]
