"""A real engine's scores of prompts against plain forwards, and its prefix cache. Where it is
installed, the SDK decodes answers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tandem.wire.v1 import tinker_pb2 as wire
from tests.support.sampler_worker import (
    LENGTH,
    Sampled,
    SamplerClient,
    plain_distribution,
    plain_logprobs,
    publish,
)
from tests.support.tiny_model import VOCABULARY

BLOCK = 32
PROMPT = [(7 * i) % 90 + 3 for i in range(70)]


def fresh(seed: int, length: int = 100) -> list[int]:
    """A prompt outside the prefix cache."""
    return np.random.default_rng(seed).integers(3, VOCABULARY, length).tolist()


def dense(ids: np.ndarray) -> wire.Tensor:
    data = ids.astype("<i8").tobytes()
    return wire.Tensor(dense=data, dtype=wire.DTYPE_INT64, shape=ids.shape)


def sparse(ids: np.ndarray) -> wire.Tensor:
    """The cells that are not -1, in CSR."""
    rows, columns = np.nonzero(ids != -1)
    crow = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=len(ids)))])
    return wire.Tensor(
        sparse_csr=wire.SparseCsr(
            values=ids[rows, columns].astype("<i8").tobytes(),
            crow_indices=crow.astype("<i8").tobytes(),
            col_indices=columns.astype("<i8").tobytes(),
        ),
        dtype=wire.DTYPE_INT64,
        shape=ids.shape,
    )


def by_the_sdk(answer: Sampled):
    """The answer for a user of the SDK."""
    conversion = pytest.importorskip("tinker.proto.response_conv")
    return conversion.deserialize_sample_response(answer.message.SerializeToString())


# --- Own tokens ------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
def test_prompt_logprobs_are_at_temperature_one_whatever_was_asked(
    sampler: SamplerClient, model: Path, temperature: float
):
    answer = sampler.sample(
        PROMPT, temperature=temperature, max_tokens=1, prompt_logprobs=True, top_k=2
    )
    found = answer.prompt_logprobs
    assert found is not None and len(found) == len(PROMPT)
    assert np.isnan(found[0])
    assert np.abs(found[1:] - plain_logprobs(model, PROMPT)).max() < 1e-4


def test_a_prompt_of_one_token_has_no_logprob(sampler: SamplerClient):
    answer = sampler.sample([7], max_tokens=1, prompt_logprobs=True)
    assert answer.prompt_logprobs is not None
    assert np.isnan(answer.prompt_logprobs).tolist() == [True]


def test_prompt_logprobs_of_many_prompts_at_once_are_each_their_own(
    sampler: SamplerClient, model: Path
):
    prompts = [fresh(100 + seed, length=3 + 11 * seed) for seed in range(8)]
    answers = sampler.sample_all(
        [sampler.request(p, max_tokens=3, prompt_logprobs=True, n=2) for p in prompts]
    )
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.prompt_logprobs is not None
        assert np.abs(answer.prompt_logprobs[1:] - plain_logprobs(model, prompt)).max() < 1e-4


def test_the_last_n_equal_those_of_the_whole_prompt_and_earlier_tokens_come_from_the_cache(
    sampler: SamplerClient,
):
    prompt, n = fresh(1), 10
    whole, *lasts = [
        sampler.sample(prompt, max_tokens=1, prompt_logprobs=True, last_n=last_n, prompt_topk=2)
        for last_n in (None, n, n)
    ]
    assert whole.prompt_logprobs is not None
    for last in lasts:
        assert last.prompt_logprobs is not None
        assert np.isnan(last.prompt_logprobs[:-n]).all()
        assert (last.prompt_logprobs[-n:] == whole.prompt_logprobs[-n:]).all()
        rows = np.frombuffer(last.message.topk_prompt_logprobs.logprobs, "<f4").reshape(-1, 2)
        assert (rows[:-n] == -99999).all() and (rows[-n:] > -99999).all()
    # The engine computes the state before the first one, so it may read 100 - 10 - 1 cached tokens.
    assert [answer.reply.cached_tokens for answer in (whole, *lasts)] == [0, 64, 64]


@pytest.mark.parametrize(
    ("n", "cached"), [(1, 96), (3, 96), (4, 64), (35, 64), (36, 32), (67, 32), (68, 0), (99, 0)]
)
def test_a_scored_suffix_is_exact_wherever_the_cached_blocks_end(
    sampler: SamplerClient, model: Path, n: int, cached: int
):
    prompt = fresh(2)
    sampler.sample(prompt, max_tokens=1)
    answer = sampler.sample(prompt, max_tokens=1, prompt_logprobs=True, last_n=n)
    assert answer.message.prompt_cache_hit_tokens == cached
    assert answer.prompt_logprobs is not None
    assert np.abs(answer.prompt_logprobs[-n:] - plain_logprobs(model, prompt)[-n:]).max() < 1e-4
    assert np.isnan(answer.prompt_logprobs[:-n]).all()


def test_topk_of_the_prompt_lists_the_likeliest_at_each_position(
    sampler: SamplerClient, model: Path
):
    answer = sampler.sample(PROMPT, max_tokens=1, prompt_topk=4)
    assert answer.prompt_logprobs is None, "only the likeliest were asked for"
    topk = by_the_sdk(answer).topk_prompt_logprobs
    assert topk[0] is None
    expected = plain_distribution(model, PROMPT)
    for row, wanted in zip(topk[1:], expected, strict=True):
        assert [token for token, _ in row] == np.argsort(-wanted)[:4].tolist()
        assert np.abs([value for _, value in row] - np.sort(wanted)[:-5:-1]).max() < 1e-4


# --- Chosen targets --------------------------------------------------------------------------


def test_targets_are_scored_at_their_positions_and_empty_cells_are_zero(
    sampler: SamplerClient, model: Path
):
    rng = np.random.default_rng(0)
    ids = rng.integers(0, VOCABULARY, (len(PROMPT) - 1, 3))
    ids[rng.random(ids.shape) < 0.3] = -1
    expected = plain_distribution(model, PROMPT)
    wanted = np.where(ids == -1, 0.0, np.take_along_axis(expected, np.maximum(ids, 0), axis=1))
    full, listed = (
        by_the_sdk(
            sampler.sample(PROMPT, max_tokens=1, temperature=0.5, targets=tensor)
        ).target_prompt_logprobs
        for tensor in (dense(ids), sparse(ids))
    )
    assert full.shape == listed.shape == [len(PROMPT) - 1, 3]
    assert full.sparse_crow_indices is None
    assert np.abs(full.to_numpy() - wanted).max() < 1e-4
    assert len(listed.data) == (ids != -1).sum()
    assert np.abs(listed.to_numpy() - wanted).max() < 1e-4


def test_a_target_that_is_the_prompts_own_token_has_its_prompt_logprob(sampler: SamplerClient):
    ids = np.asarray(PROMPT[1:])[:, None]
    answer = sampler.sample(PROMPT, max_tokens=1, targets=dense(ids), prompt_logprobs=True)
    assert answer.prompt_logprobs is not None
    own = np.frombuffer(answer.message.target_prompt_logprobs.dense, "<f4")
    assert (own == answer.prompt_logprobs[1:]).all()


def test_tokens_before_the_first_target_come_from_the_cache(sampler: SamplerClient, model: Path):
    prompt = fresh(3)
    sampler.sample(prompt, max_tokens=1)
    ids = np.full((len(prompt) - 1, 2), -1)
    ids[70, 1] = 9
    answer = sampler.sample(prompt, max_tokens=1, targets=sparse(ids))
    assert answer.message.prompt_cache_hit_tokens == 64
    (value,) = np.frombuffer(answer.message.target_prompt_logprobs.sparse_csr.values, "<f4")
    assert abs(value - plain_distribution(model, prompt)[70, 9]) < 1e-4


# --- Drawn alternatives ----------------------------------------------------------------------


def test_drawn_alternatives_have_the_models_logprobs(sampler: SamplerClient, model: Path):
    answer = by_the_sdk(sampler.sample(PROMPT, max_tokens=1, temperature=2.0, draws=5))
    tokens, logprobs = (
        each.to_numpy().reshape(each.shape)
        for each in (answer.prompt_alt_tokens.tokens, answer.prompt_alt_tokens.logprobs)
    )
    assert tokens.shape == logprobs.shape == (len(PROMPT) - 1, 5)
    expected = np.take_along_axis(plain_distribution(model, PROMPT), tokens, axis=1)
    assert np.abs(logprobs - expected).max() < 1e-4


@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_alternatives_are_drawn_from_the_distribution_at_the_requests_temperature(
    sampler: SamplerClient, model: Path, temperature: float
):
    prompt, k = [5, 9, 30, 41], 1000
    answers = sampler.sample_all(
        [
            sampler.request(prompt, max_tokens=1, temperature=temperature, draws=k, seed=seed)
            for seed in range(8)
        ]
    )
    drawn = np.concatenate(
        [
            np.frombuffer(a.message.prompt_alt_tokens.tokens.dense, "<i4").reshape(3, k)
            for a in answers
        ],
        axis=1,
    )
    scaled = plain_distribution(model, prompt) / temperature
    probabilities = np.exp(scaled - np.log(np.exp(scaled).sum(axis=1, keepdims=True)))
    for row, expected in zip(drawn, probabilities, strict=True):
        found = np.bincount(row, minlength=VOCABULARY) / len(row)
        # Six standard deviations of a frequency, for each of the 96 tokens.
        assert (np.abs(found - expected) < 6 * np.sqrt(expected / len(row)) + 1e-3).all()


def test_draws_depend_on_the_seed_alone_and_are_greedy_at_temperature_zero(
    sampler: SamplerClient, model: Path
):
    def draws(seed: int | None, temperature: float = 1.0) -> np.ndarray:
        answer = sampler.sample(PROMPT, max_tokens=1, seed=seed, temperature=temperature, draws=3)
        return np.frombuffer(answer.message.prompt_alt_tokens.tokens.dense, "<i4").reshape(-1, 3)

    assert (draws(4) == draws(4)).all()
    assert (draws(4) != draws(5)).any()
    assert (draws(None) != draws(None)).any()
    greedy = plain_distribution(model, PROMPT).argmax(axis=1)
    assert (draws(1, temperature=0.0) == greedy[:, None]).all()


# --- The prefix cache ------------------------------------------------------------------------


def test_a_prompt_seen_before_hits_the_cache_in_whole_blocks(sampler: SamplerClient):
    prompt = fresh(5, length=2 * BLOCK + 7)
    answers = [sampler.sample(prompt, n=3, max_tokens=1, seed=seed) for seed in (None, None, 7)]
    assert [a.message.prompt_cache_hit_tokens for a in answers] == [0, 2 * BLOCK, 2 * BLOCK]
    assert [a.reply.cached_tokens for a in answers] == [0, 2 * BLOCK, 2 * BLOCK]
    assert all(answer.reply.seconds > 0 for answer in answers)


def test_the_last_token_of_a_prompt_is_never_a_hit(sampler: SamplerClient):
    prompt = fresh(6, length=2 * BLOCK)
    hits = [sampler.sample(prompt, max_tokens=1).reply.cached_tokens for _ in range(2)]
    assert hits == [0, BLOCK]


def test_scoring_a_whole_prompt_reads_no_cache_and_fills_it(sampler: SamplerClient):
    prompt = fresh(7)
    answers = [
        sampler.sample(prompt, max_tokens=1, prompt_logprobs=scored)
        for scored in (True, True, False)
    ]
    assert [a.message.prompt_cache_hit_tokens for a in answers] == [0, 0, 96]
    assert answers[0].message.prompt_logprobs == answers[1].message.prompt_logprobs


def test_samples_are_the_same_with_and_without_the_cache(sampler: SamplerClient):
    prompt = fresh(8)
    cold, warm = (sampler.sample(prompt, max_tokens=8, seed=1) for _ in range(2))
    assert warm.message.prompt_cache_hit_tokens > 0
    assert cold.message.sequences == warm.message.sequences


def test_cached_prompts_of_the_old_version_are_not_used_with_the_new_one(
    sampler: SamplerClient, changed: Path, directory: Path
):
    prompt = fresh(9)
    for _ in range(2):
        sampler.sample(prompt, max_tokens=1)
    version = publish(changed, directory, number=4)
    answer = sampler.sample(prompt, version=version, max_tokens=8, seed=1, stop=[])
    assert answer.message.prompt_cache_hit_tokens == 0
    (sample,) = answer.samples
    expected = plain_logprobs(changed, prompt + sample.tokens)[len(prompt) - 1 :]
    assert np.abs(expected - sample.logprobs).max() < 1e-4


def computed(client: SamplerClient) -> int:
    return int(client.metric('tandem_sampler_tokens_total{kind="prompt_computed"}'))


@pytest.mark.parametrize("length", [2, 20, BLOCK, BLOCK + 1, 100])
@pytest.mark.parametrize("scored", [False, True])
def test_samples_of_a_prompt_share_one_prefill(sampler: SamplerClient, length: int, scored: bool):
    prompt, n = fresh(10 * length + scored, length), 8
    before = computed(sampler)
    together = sampler.sample(
        prompt, n=n, seed=5, max_tokens=6, stop=[], prompt_logprobs=scored, topk=2
    )
    assert computed(sampler) - before == length + n - 1
    alone = sampler.sample(prompt, n=1, seed=5, max_tokens=6, stop=[], prompt_logprobs=True, topk=2)
    assert together.message.sequences[0] == alone.message.sequences[0]
    if scored:
        assert together.message.prompt_logprobs == alone.message.prompt_logprobs


def test_samples_that_share_a_prefill_are_those_that_compute_it_each(sampler: SamplerClient):
    """Neither the number of samples nor computing the whole prompt (as `max_tokens=1` and scores
    do) changes the last sample."""
    prompt = fresh(77, 45)
    few, many = (
        sampler.sample(prompt, n=n, seed=5, max_tokens=9, stop=[], topk=2) for n in (2, 16)
    )
    single = sampler.sample(prompt, n=16, seed=5, max_tokens=1, stop=[], topk=2)
    assert list(few.message.sequences) == list(many.message.sequences)[:2]
    firsts = [(s.tokens[0], s.logprobs[0]) for s in many.samples]
    assert firsts == [(s.tokens[0], s.logprobs[0]) for s in single.samples]


def test_a_group_whose_first_sample_ends_at_once_is_whole(sampler: SamplerClient):
    prompt = fresh(78, 45)
    plain = sampler.sample(prompt, n=6, seed=5, max_tokens=4, stop=[])
    first = plain.samples[0].tokens[0]
    stopped = sampler.sample(prompt, n=6, seed=5, max_tokens=4, stop=[first])
    for one, other in zip(plain.samples, stopped.samples, strict=True):
        end = one.tokens.index(first) + 1 if first in one.tokens else 4
        assert other.tokens == one.tokens[:end]


# --- Prompts that fill the context -----------------------------------------------------------


@pytest.mark.parametrize("max_tokens", [0, 1, None])
def test_a_prompt_as_long_as_the_model_is_scored(
    sampler: SamplerClient, model: Path, max_tokens: int | None
):
    prompt = fresh(77, LENGTH)
    answer = sampler.sample(prompt, max_tokens=max_tokens, prompt_logprobs=True, prompt_topk=2, n=2)
    assert answer.prompt_logprobs is not None
    expected = plain_logprobs(model, prompt)
    assert np.abs(answer.prompt_logprobs[1:] - expected).max() < 1e-4
    assert [(list(s.tokens), s.stopped) for s in answer.samples] == [([], False)] * 2


def test_a_suffix_and_targets_of_a_full_prompt_are_scored(sampler: SamplerClient, model: Path):
    prompt = fresh(78, LENGTH)
    suffix = sampler.sample(prompt, max_tokens=1, prompt_logprobs=True, last_n=1).prompt_logprobs
    assert suffix is not None
    expected = plain_logprobs(model, prompt)
    assert abs(suffix[-1] - expected[-1]) < 1e-4
    own = np.asarray(prompt[1:])[:, None]
    targets = sampler.sample(prompt, max_tokens=1, targets=dense(own))
    scores = np.frombuffer(targets.message.target_prompt_logprobs.dense, "<f4")
    assert np.abs(scores - expected).max() < 1e-4


def test_a_request_for_no_tokens_returns_none_and_reads_the_cache(sampler: SamplerClient):
    prompt = fresh(79, 3 * BLOCK + 5)
    sampler.sample(prompt, max_tokens=1)
    answer = sampler.sample(prompt, max_tokens=0, topk=2, stop=[])
    assert [list(s.tokens) for s in answer.samples] == [[]]
    assert answer.message.prompt_cache_hit_tokens == 3 * BLOCK
