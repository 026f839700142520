"""Advantages and schedules of the client-side library."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tandem.rl import advantages, linear_decay

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "losses.json").read_text())


def test_grpo_advantages_equal_the_golden_numbers() -> None:
    rewards = np.array([GOLDEN["inputs"]["reward"]])
    expected = GOLDEN["expected"]["adv_grpo_ddof1_eps1e-4"]
    np.testing.assert_allclose(advantages("grpo", rewards)[0], expected, atol=1e-7)


def test_a_group_of_equal_rewards_teaches_grpo_nothing() -> None:
    assert advantages("grpo", np.ones((2, 4))).tolist() == [[0.0] * 4] * 2


def test_reward_advantages_are_a_copy_of_the_rewards() -> None:
    rewards = np.array([[1.0, 0.0]])
    found = advantages("reward", rewards)
    found[0, 0] = 5
    assert rewards.tolist() == [[1.0, 0.0]]


def test_an_unknown_algorithm_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'ppo2'.*reward, grpo"):
        advantages("ppo2", np.ones((1, 2)))


def test_the_rate_falls_linearly_and_the_first_step_is_halved() -> None:
    rates = [
        linear_decay(step=step, steps=10, peak=1.0, final=0.1, first=0.5) for step in range(1, 11)
    ]
    assert rates[0] == 0.5
    assert rates[1] == pytest.approx(0.9)
    assert rates[-1] == pytest.approx(0.1)
    np.testing.assert_allclose(np.diff(rates[1:]), -0.1)
