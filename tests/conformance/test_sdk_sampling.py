"""SamplingClient: samples, logprobs, handles, and copies of a client."""

from __future__ import annotations

import base64
import logging
import pickle

import numpy as np
import pytest
import torch
from tinker import SamplingClient, ServiceClient, TrainingClient, types

from tests.conformance.conform.calls import Call, settled
from tests.conformance.conform.claims import proves, proves_both
from tests.support.plain_model import distributions, plain_logprobs
from tests.support.sdk import (
    largest_difference,
    logprobs,
    params,
    prompt_logprobs,
    sample,
    sequences,
    train,
)
from tests.support.stacks import TIED, VOCABULARY, TestStack

TOLERANCE = 1e-4
PROMPT = [5, 6, 7, 8, 9, 10]


def ints(tokens: list[int]) -> types.ModelInput:
    return types.ModelInput.from_ints(tokens)


def tokens_of(sequences: list[types.SampledSequence]) -> list[list[int]]:
    return [list(sequence.tokens) for sequence in sequences]


@pytest.fixture(scope="module")
def trained(runs: dict[str, TrainingClient]) -> TrainingClient:
    run = runs["lora"]
    train(run, seed=50, steps=2)
    return run


@pytest.fixture(scope="module")
def sampler(trained: TrainingClient) -> SamplingClient:
    return settled(trained.save_weights_and_get_sampling_client())


@pytest.mark.core
@proves_both(
    "SamplingClient.sample",
    that="a seed repeats the samples; the samples of a request differ, and have the trainer's "
    "logprobs and an id each",
)
def test_samples_follow_their_seed_and_the_trainer(
    call: Call, trained: TrainingClient, sampler: SamplingClient
) -> None:
    def drawn(seed: int) -> types.SampleResponse:
        return call(sampler, "sample", ints(PROMPT), 4, params(tokens=12, seed=seed))

    first, again, other = drawn(1), drawn(1), drawn(2)
    assert tokens_of(first.sequences) == tokens_of(again.sequences) != tokens_of(other.sequences)
    assert len({tuple(sequence.tokens) for sequence in first.sequences}) == 4
    ids = {s.sequence_id for each in (first, again, other) for s in each.sequences}
    assert len(ids) == 12
    expected = logprobs(trained, [PROMPT + tokens for tokens in tokens_of(first.sequences)])
    found = [np.array(sequence.logprobs, np.float32) for sequence in first.sequences]
    assert largest_difference([row[-12:] for row in expected], found) < TOLERANCE
    assert {sequence.stop_reason for sequence in first.sequences} == {"length"}


@pytest.mark.core
@proves(
    "SamplingClient.sample",
    that="temperature 0, top_k 1 and a tiny top_p all give the model's most likely tokens",
)
def test_greedy_sampling_takes_the_most_likely_token(base_sampler: SamplingClient, base) -> None:
    greedy = list(PROMPT)
    for _ in range(6):
        with torch.no_grad():
            greedy.append(int(distributions(base, greedy)[-1].argmax()))
    for settings in ({"temperature": 0.0}, {"top_k": 1}, {"top_p": 1e-6}):
        asked = types.SamplingParams(max_tokens=6, seed=3, stop=[], **settings)
        answer = settled(base_sampler.sample(ints(PROMPT), 1, asked))
        assert PROMPT + list(answer.sequences[0].tokens) == greedy, settings


@pytest.mark.core
@proves(
    "SamplingClient.sample",
    that="logprobs are at the request's temperature",
)
def test_sampled_logprobs_are_tempered(base_sampler: SamplingClient, base) -> None:
    (sequence,) = sample(base_sampler, PROMPT, tokens=8, seed=4, temperature=0.5)
    whole = PROMPT + list(sequence.tokens)
    with torch.no_grad():
        rows = (distributions(base, whole)[len(PROMPT) - 1 : -1] / 0.5).log_softmax(-1)
    expected = rows.gather(-1, torch.tensor(sequence.tokens)[:, None])[:, 0].numpy()
    assert largest_difference([expected], [np.array(sequence.logprobs)]) < TOLERANCE


@pytest.mark.core
@proves(
    "SamplingClient.sample",
    that="stops at a token id or a string, which the sample includes",
)
def test_stops_end_a_sample(base_sampler: SamplingClient, model_path) -> None:
    from transformers import AutoTokenizer

    (whole,) = sample(base_sampler, PROMPT, tokens=12, seed=5)
    stop = whole.tokens[6]
    end = list(whole.tokens).index(stop) + 1
    text = AutoTokenizer.from_pretrained(model_path).decode([stop])
    for stops in ([stop], [text], text):
        asked = types.SamplingParams(max_tokens=12, seed=5, stop=stops)
        (sequence,) = settled(base_sampler.sample(ints(PROMPT), 1, asked)).sequences
        assert sequence.stop_reason == "stop"
        assert list(sequence.tokens) == list(whole.tokens)[:end]


@proves(
    "SamplingClient.sample",
    that="prompt logprobs, top-k logprobs of prompt and samples, logprobs of chosen targets, and "
    "alternative prompt tokens all have the plain model's numbers",
)
def test_all_kinds_of_logprobs_are_the_models(base_sampler: SamplingClient, base) -> None:
    targets = np.full((len(PROMPT) - 1, 2), -1)
    targets[1] = [20, 30]
    targets[4, 0] = 40
    answer = settled(
        base_sampler.sample(
            ints(PROMPT),
            1,
            params(tokens=5, seed=6),
            include_prompt_logprobs=True,
            topk_prompt_logprobs=3,
            topk_sample_logprobs=2,
            target_prompt_logprobs=types.TensorData.from_numpy(targets),
            prompt_alt_tokens_k=4,
        )
    )
    with torch.no_grad():
        rows = distributions(base, PROMPT + list(answer.sequences[0].tokens))
    prompt = rows[: len(PROMPT) - 1]

    assert answer.prompt_logprobs[0] is None
    expected = [float(row[token]) for row, token in zip(prompt, PROMPT[1:], strict=True)]
    assert answer.prompt_logprobs[1:] == pytest.approx(expected, abs=TOLERANCE)

    assert answer.topk_prompt_logprobs[0] is None
    for found, row in zip(answer.topk_prompt_logprobs[1:], prompt, strict=True):
        _is_top(found, row, k=3)
    sampled = rows[len(PROMPT) - 1 : -1]
    for found, row in zip(answer.sequences[0].topk_logprobs, sampled, strict=True):
        _is_top(found, row, k=2)

    scored = np.array(answer.target_prompt_logprobs.data).reshape(targets.shape)
    for (row, column), token in np.ndenumerate(targets):
        value = 0.0 if token < 0 else float(prompt[row, token])
        assert scored[row, column] == pytest.approx(value, abs=TOLERANCE)

    alternatives = np.array(answer.prompt_alt_tokens.tokens.data).reshape(-1, 4)
    drawn = np.array(answer.prompt_alt_tokens.logprobs.data).reshape(-1, 4)
    assert len(alternatives) == len(PROMPT) - 1
    assert ((alternatives >= 0) & (alternatives < VOCABULARY)).all()
    value = prompt.gather(-1, torch.tensor(alternatives)).numpy()
    assert np.abs(drawn - value).max() < TOLERANCE
    assert len(np.unique(alternatives)) > 4, "independent draws differ"


def _is_top(found: list[tuple[int, float]], row: torch.Tensor, *, k: int) -> None:
    values, tokens = row.topk(k)
    assert [token for token, _ in found[:k]] == tokens.tolist()
    assert [value for _, value in found[:k]] == pytest.approx(values.tolist(), abs=TOLERANCE)


@proves(
    "SamplingClient.sample",
    that="a prompt that was seen before is counted as prefix-cache hits",
)
def test_a_repeated_prompt_is_found_in_the_cache(base_sampler: SamplingClient) -> None:
    (prompt,) = sequences(1, seed=60, shortest=200, longest=200)
    asked = params(tokens=1)
    first, second = (settled(base_sampler.sample(ints(prompt), 1, asked)) for _ in range(2))
    assert first.prompt_cache_hit_tokens == 0
    assert 0 < second.prompt_cache_hit_tokens < len(prompt)


@pytest.mark.core
@proves_both(
    "SamplingClient.compute_logprobs", that="equals a plain forward pass; none for the first token"
)
def test_computed_logprobs_are_a_forward_pass(
    call: Call, base_sampler: SamplingClient, base
) -> None:
    tokens = sequences(3, seed=61)
    for sequence, expected in zip(tokens, plain_logprobs(base, tokens), strict=True):
        found = call(base_sampler, "compute_logprobs", ints(sequence))
        assert found[0] is None
        assert found[1:] == pytest.approx(expected.tolist(), abs=TOLERANCE)


@proves_both("SamplingClient.compute_logprobs", that="can score only the last N tokens")
def test_the_last_tokens_can_be_scored_alone(
    call: Call, base_sampler: SamplingClient, base
) -> None:
    tokens = sequences(1, seed=62, shortest=20, longest=20)
    (expected,) = plain_logprobs(base, tokens)
    found = call(base_sampler, "compute_logprobs", ints(tokens[0]), prompt_logprobs_last_n=5)
    assert found[:-5] == [None] * 15
    assert found[-5:] == pytest.approx(expected[-5:].tolist(), abs=TOLERANCE)


@pytest.mark.core
@proves("SamplingClient.create", that="makes a client of base weights with the model's numbers")
def test_a_client_can_be_created_from_a_holder(service: ServiceClient, base) -> None:
    sampler = settled(SamplingClient.create(service.holder, base_model=TIED))
    tokens = sequences(2, seed=63)
    assert largest_difference(prompt_logprobs(sampler, tokens), plain_logprobs(base, tokens)) < (
        TOLERANCE
    )


@pytest.mark.core
@proves(
    "SamplingClient.get_sampler_handle",
    "SamplingClient.from_sampler_handle",
    that="a client rebuilt from the handle gives the same samples; the handle holds no key",
)
def test_a_handle_leads_to_the_same_sampler(sampler: SamplingClient, stack: TestStack) -> None:
    handle = sampler.get_sampler_handle()
    assert stack.stack.endpoint.api_key.encode() not in base64.urlsafe_b64decode(handle)
    expected = tokens_of(sample(sampler, PROMPT, count=2, seed=7))
    for key in (None, stack.stack.endpoint.api_key):
        rebuilt = SamplingClient.from_sampler_handle(handle, api_key=key)
        assert tokens_of(sample(rebuilt, PROMPT, count=2, seed=7)) == expected
        assert rebuilt.get_base_model() == TIED


@pytest.mark.core
@proves("SamplingClient.sample", that="a pickled client gives the same samples")
def test_a_pickled_client_gives_the_same_samples(sampler: SamplingClient) -> None:
    copy = pickle.loads(pickle.dumps(sampler))
    expected = tokens_of(sample(sampler, PROMPT, count=2, seed=8))
    assert tokens_of(sample(copy, PROMPT, count=2, seed=8)) == expected


@pytest.mark.core
@proves_both("SamplingClient.get_base_model", that="names the base model, also of sampler weights")
def test_the_base_model_is_named(
    call: Call, sampler: SamplingClient, base_sampler: SamplingClient
) -> None:
    assert call(sampler, "get_base_model") == call(base_sampler, "get_base_model") == TIED


@pytest.mark.core
@proves("SamplingClient.get_tokenizer", that="is the tokenizer of the base model")
def test_the_samplers_tokenizer_is_the_models(
    base_sampler: SamplingClient, model_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The SDK finds a base model by its name alone: in a hub's cache, or as a folder here.
    monkeypatch.chdir(model_path.parent.parent)
    assert base_sampler.get_tokenizer().decode([13, 14]) == "*+"


@pytest.mark.core
def test_a_base_model_named_by_its_path_has_its_tokenizer(
    service: ServiceClient, model_path
) -> None:
    sampler = settled(service.create_sampling_client(base_model=f"{model_path}/"))
    assert sampler.get_tokenizer().decode([13, 14]) == "*+"


@proves(
    "SamplingClient.on_queue_state_change",
    that="a pause is told once with the server's reason, and activity is not",
)
def test_a_pause_is_told_with_its_reason(
    service: ServiceClient, caplog: pytest.LogCaptureFixture
) -> None:
    from tinker.lib.api_future_impl import QueueState

    sampler = settled(service.create_sampling_client(base_model=TIED))
    with caplog.at_level(logging.WARNING, logger="tinker"):
        sampler.on_queue_state_change(QueueState.ACTIVE, None)
        sampler.on_queue_state_change(QueueState.PAUSED_CAPACITY, "the engine is starting")
        sampler.on_queue_state_change(QueueState.PAUSED_CAPACITY, "the engine is starting")
    told = [record.message for record in caplog.records if "paused" in record.message]
    assert len(told) == 1
    assert "the engine is starting" in told[0]
