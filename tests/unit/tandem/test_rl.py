from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tandem.rl import (
    RLConfig,
    batch_std,
    dr_grpo,
    dynamic_sampling,
    gae,
    grpo,
    maxrl,
    overlong_mask,
    reinforce_plus_plus,
    returns_to_go,
    reward,
    rloo,
    soft_overlong,
    staleness,
)

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "losses.json").read_text())


EXPECTED = GOLDEN["expected"]
REWARDS = np.array(GOLDEN["inputs"]["reward"])
MASK = np.array(GOLDEN["inputs"]["mask"])


@pytest.mark.parametrize(
    ("golden", "found"),
    [
        ("adv_grpo_ddof1_eps1e-4", grpo(REWARDS[None])),
        ("adv_grpo_ddof1_eps1e-4", grpo(REWARDS[None], ddof=1, eps=1e-4)),
        ("adv_grpo_ddof1_eps1e-6", grpo(REWARDS[None], eps=1e-6)),
        ("adv_grpo_ddof0_eps1e-6", grpo(REWARDS[None], ddof=0, eps=1e-6)),
        ("adv_dr_grpo", dr_grpo(REWARDS[None])),
        ("adv_rloo", rloo(REWARDS[None])),
        ("adv_maxrl_eps1e-6", maxrl(REWARDS[None])),
    ],
)
def test_golden_advantages_of_a_group(golden: str, found: np.ndarray) -> None:
    np.testing.assert_allclose(found[0], EXPECTED[golden], atol=1e-7)


@pytest.mark.parametrize("estimator", [reward, grpo, dr_grpo, rloo, maxrl])
def test_a_group_is_compared_with_itself_alone(estimator) -> None:
    rewards = np.stack([REWARDS, REWARDS[::-1] * 3 + 1])
    np.testing.assert_allclose(estimator(rewards)[:1], estimator(rewards[:1]))


def test_batch_std_divides_all_groups_by_one_deviation() -> None:
    rewards = np.array([[1.0, 0.0], [1.0, 0.9]])
    expected = (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(ddof=1) + 1e-4)
    np.testing.assert_allclose(batch_std(rewards), expected)
    np.testing.assert_allclose(batch_std(REWARDS[None]), grpo(REWARDS[None]))


def test_leaving_one_out_of_one_is_refused() -> None:
    with pytest.raises(ValueError, match="two answers"):
        rloo(np.ones((3, 1)))


@pytest.mark.parametrize(("ddof", "kind"), [(0, "biasedvar"), (1, "unbiasedvar")])
def test_golden_reinforce_plus_plus(ddof: int, kind: str) -> None:
    found = reinforce_plus_plus(REWARDS, MASK, ddof=ddof)
    np.testing.assert_allclose(found, EXPECTED[f"adv_reinforce_pp_{kind}"], atol=1e-7)


def test_the_baseline_of_reinforce_plus_plus_is_the_mean_of_the_group() -> None:
    centred = (REWARDS.reshape(2, 2) - REWARDS.reshape(2, 2).mean(1, keepdims=True)).reshape(-1)
    found = reinforce_plus_plus(REWARDS, MASK, group=2)
    np.testing.assert_allclose(found, reinforce_plus_plus(centred, MASK))
    with pytest.raises(ValueError, match="4 sequences do not divide into groups of 3"):
        reinforce_plus_plus(REWARDS, MASK, group=3)


def test_returns_are_discounted_over_tokens_that_count() -> None:
    rewards, mask = np.array([[0.0, 0.0, 1.0, 9.0]]), np.array([[1.0, 0.0, 1.0, 0.0]])
    assert returns_to_go(rewards, mask, discount=0.5).tolist() == [[0.5, 0.0, 1.0, 0.0]]


def test_golden_gae() -> None:
    found, returns = gae(np.array([0.0, 0.0, 1.0]), np.array([0.2, 0.4, 0.7]))
    np.testing.assert_allclose(found, EXPECTED["gae_adv"], atol=1e-7)
    np.testing.assert_allclose(returns, EXPECTED["gae_returns"], atol=1e-7)


def test_golden_soft_overlong() -> None:
    expected = {int(length): cost for length, cost in EXPECTED["soft_overlong(20480,4096)"].items()}
    found = soft_overlong(np.array([*expected]), longest=20480, buffer=4096)
    np.testing.assert_allclose(found, [*expected.values()])


def test_golden_dynamic_sampling() -> None:
    expected = EXPECTED["dynamic_sampling_keep"]
    groups = np.array([json.loads(group) for group in expected]) == 1
    assert dynamic_sampling(groups).tolist() == [*expected.values()]


def test_truncated_answers_are_masked() -> None:
    mask = overlong_mask(np.array([False, True, False, False]), MASK)
    assert mask.sum(1).tolist() == [3, 0, 3, 1]


def test_a_group_of_equal_rewards_teaches_grpo_nothing() -> None:
    assert grpo(np.ones((2, 4))).tolist() == [[0.0] * 4] * 2


def test_reward_advantages_are_a_copy_of_the_rewards() -> None:
    rewards = np.array([[1.0, 0.0]])
    found = reward(rewards)
    found[0, 0] = 5
    assert rewards.tolist() == [[1.0, 0.0]]


def rates(steps: int, **settings: float) -> list[float]:
    sizes = {"steps": steps, "groups_per_step": 1, "group_size": 1, "max_tokens": 1}
    config = RLConfig(learning_rate=1.0, **sizes, **settings)
    return [config.rate_of(step, last=steps) for step in range(1, steps + 1)]


def test_the_rate_falls_linearly() -> None:
    found = rates(10, final_learning_rate=0.1)
    assert found[0] == 1.0
    assert found[-1] == pytest.approx(0.1)
    np.testing.assert_allclose(np.diff(found), -0.1)


def test_the_rate_rises_in_equal_parts_during_the_warmup() -> None:
    found = rates(5, final_learning_rate=0.5, warmup_steps=2)
    assert found == pytest.approx([1 / 3, 2 / 3, 1.0, 0.75, 0.5])
    assert rates(1, final_learning_rate=0.1, warmup_steps=1) == [0.5]


def test_each_token_is_as_old_as_its_weights() -> None:
    runs = [{"version": "v3", "step": 3, "tokens": 2}, {"version": "v5", "step": 5, "tokens": 1}]
    assert staleness(runs, step=6).tolist() == [3, 3, 1]
    assert staleness([], step=6).tolist() == []
