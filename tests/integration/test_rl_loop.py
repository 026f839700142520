"""`tandem.rl.train` with a real trainer and engine."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

from tinker import ServiceClient

from tandem.rl import Evaluation, Example, Result, RLConfig, resumable, train
from tests.support.stacks import TIED, TestStack

PROBLEMS = [Example([5 + number, 6, 7]) for number in range(12)]
CONFIG = RLConfig(
    steps=4,
    groups_per_step=4,
    group_size=4,
    max_tokens=8,
    learning_rate=1e-3,
    stop=(),
    grad_clip_norm=1.0,
)


def share_of_digits(_example: Example, answer: str) -> float:
    return sum(letter.isdigit() for letter in answer) / 8


def losses(result: Result) -> list[float]:
    return [report.metrics["loss:sum"] for report in result.steps]


def test_a_synchronous_loop_that_was_continued_equals_the_uninterrupted_one(
    service: ServiceClient, tmp_path: Path
) -> None:
    training = resumable(service, f"{TIED}:full")
    whole = train(training, PROBLEMS, share_of_digits, CONFIG, tracked=False)
    first = train(
        training, PROBLEMS, share_of_digits, replace(CONFIG, steps=2, out=tmp_path), tracked=False
    )
    second = train(
        training, PROBLEMS, share_of_digits, replace(CONFIG, out=tmp_path), tracked=False
    )
    assert losses(first) + losses(second) == losses(whole)
    rewards = [report.reward for report in (*first.steps, *second.steps)]
    assert rewards == [report.reward for report in whole.steps]
    assert len(set(losses(whole))) == 4
    assert [report.oldest for report in whole.steps] == [0] * 4


def test_an_asynchronous_loop_in_flight_knows_its_tokens_versions_and_is_recorded(
    service: ServiceClient, stack: TestStack
) -> None:
    config = replace(
        CONFIG, steps=6, off_by=1, in_flight=True, evaluate_every=3, name="in flight", tags=("rl",)
    )
    evaluation = Evaluation(dataset=PROBLEMS[:4])
    training = resumable(service, f"{TIED}:full")
    result = train(training, PROBLEMS, share_of_digits, config, evaluation=evaluation)
    assert [report.step for report in result.steps] == [1, 2, 3, 4, 5, 6]
    assert max(report.oldest for report in result.steps) == 1
    assert [score.step for score in result.evaluations] == [0, 3, 6]
    load = asyncio.run(result.policy.load())
    assert (load.running, load.waiting) == (0, 0)
    assert 0 <= load.kv_used < 1
    with stack.stack.client() as client:
        [run] = client.get("runs", params={"name": "in flight"}).raise_for_status().json()["runs"]
        assert run["progress"]["percent"] == 100
        assert run["last"]["reward"] == result.steps[-1].reward
        assert run["last"]["evaluation/reward"] == result.evaluations[-1].reward
        rollouts = client.get(f"runs/{run['id']}/rollouts").raise_for_status().json()
        assert rollouts["total_count"] == 16
