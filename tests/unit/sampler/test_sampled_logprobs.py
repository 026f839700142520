from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from sampler_service.vllm.prompt_scoring import EMPTY_LOGPROB
from sampler_service.vllm.sampled_logprobs import SampledLogprobs

Rows = tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]


def drawn(*, tokens: int, columns: int) -> Rows:
    """Return rows in vLLM's form, with ties and filtered values."""
    random = np.random.default_rng(tokens)
    ids = random.integers(0, 9, (tokens, columns), np.int32)
    values = np.round(-random.random((tokens, columns), np.float32), 1)
    values[:, 1:][random.random((tokens, columns - 1)) < 0.3] = -np.inf
    return ids, values


def collected(rows: Rows, *, topk: int) -> SampledLogprobs:
    sampled = SampledLogprobs(topk)
    for row in range(len(rows[0])):
        sampled.append(rows[0][row : row + 1], rows[1][row : row + 1])
    return sampled


@pytest.mark.parametrize("columns", [6, 9])
@pytest.mark.parametrize("start", [0, 3, 20])
def test_each_cell_is_its_token_unless_a_filter_excluded_it(columns: int, start: int):
    rows = drawn(tokens=20, columns=columns)
    topk = collected(rows, topk=5).topk(start)
    assert topk is not None
    assert topk.token_ids.shape == topk.logprobs.shape == (20 - start, 5)
    assert (topk.token_ids.dtype, topk.logprobs.dtype) == (np.int32, np.float32)
    for row in range(20 - start):
        for column in range(5):
            value = rows[1][start + row, 1 + column]
            cell = (topk.token_ids[row, column], topk.logprobs[row, column])
            expected = (rows[0][start + row, 1 + column], value)
            assert cell == (expected if np.isfinite(value) else (0, EMPTY_LOGPROB))


def test_a_tokens_own_logprob_is_the_first_of_its_row():
    rows = drawn(tokens=7, columns=3)
    sampled = collected(rows, topk=0)
    assert sampled.own(2).tolist() == rows[1][2:, 0].tolist()
    assert sampled.topk(0) is None


def test_a_sample_without_tokens_has_none():
    sampled = SampledLogprobs(4)
    topk = sampled.topk(0)
    assert topk is not None
    assert (sampled.own(0).shape, topk.token_ids.shape) == ((0,), (0, 4))


def test_what_was_returned_stays_when_more_is_sampled():
    rows = drawn(tokens=9, columns=3)
    sampled = collected((rows[0][:4], rows[1][:4]), topk=2)
    before, topk = sampled.own(0), sampled.topk(0)
    sampled.append(rows[0][4:], rows[1][4:])
    assert topk is not None
    assert (len(before), len(topk.logprobs), len(sampled.own(0))) == (4, 4, 9)
