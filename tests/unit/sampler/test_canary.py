"""How far the engine's logprobs may be from the trainer's."""

from __future__ import annotations

import numpy as np
import pytest

from sampler_service.weights.loader import compare_with_canary, default_tolerance
from tandem.errors import LoadFailed
from tandem.weights import Canary

EXPECTED = [-0.5, -36.0]


def compare(differences, *, dtype="float32"):
    computed = np.array(EXPECTED, np.float32) + np.array(differences, np.float32)
    canary = Canary(tokens=[1, 2, 3], logprobs=EXPECTED)
    return compare_with_canary(computed, canary, tolerance=default_tolerance(dtype), name="v1")


@pytest.mark.parametrize(
    ("dtype", "passes", "fails"),
    [
        ("float32", [1e-4, 1e-3], ([2e-4, 0], [0, 5e-3])),
        ("bfloat16", [0.5, 0.5], ([0.6, 0], [0, 0.6])),
    ],
)
def test_an_unlikely_token_may_differ_by_more(dtype, passes, fails):
    assert compare(passes, dtype=dtype) == pytest.approx(passes[1], rel=0.01)
    for differences in fails:
        with pytest.raises(
            LoadFailed, match=f"differ from the trainer's by {max(differences):.1g}"
        ):
            compare(differences, dtype=dtype)


def test_a_logprob_that_is_no_number_is_a_difference():
    with pytest.raises(LoadFailed, match="by nan"):
        compare([0, np.nan])


def test_an_infinite_logprob_of_the_trainer_allows_no_finite_one():
    canary = Canary(tokens=[1, 2, 3], logprobs=[-0.5, -np.inf])
    with pytest.raises(LoadFailed, match="by inf"):
        compare_with_canary(np.float32([-0.5, -36.0]), canary, tolerance=0.5, name="v1")
