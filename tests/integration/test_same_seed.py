"""One seed gives equal samples, rewards, losses and log probabilities, to the last bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tandem.demo.configuration import Reinforcement
from tandem.demo.reinforcement import Loop
from tandem.demo.tiny_model import write_tiny_model
from tests.support.sdk import outputs, sequences, supervised
from tests.support.stacks import running

pytestmark = pytest.mark.slow

NAME = "tiny"
SHORT = Reinforcement(steps=2, samples=4, minibatches=2, epochs=2)


def test_two_runs_of_a_seed_are_one_and_the_same(tmp_path: Path):
    write_tiny_model(tmp_path / "model", seed=3)
    found = []
    with running(tmp_path, models={NAME: tmp_path / "model"}) as stack:
        for _ in range(2):
            with stack.service() as service:
                client = service.create_lora_training_client(f"{NAME}:full").result()
                loop = Loop(
                    client=client,
                    tokenizer=client.get_tokenizer(),
                    seed=3,
                    configuration=SHORT,
                )
                steps = [(step.reward_mean, step.loss) for step in loop.steps()]
                drawn = [
                    (rollout.tokens, rollout.logprobs)
                    for group in loop.sample(samples=2, temperature=1.0, round_=9)
                    for rollout in group
                ]
                data = [supervised(each) for each in sequences(6, seed=1)]
                scored = outputs(client.forward(data, "cross_entropy").result())
                found.append((steps, drawn, scored))
    (steps, drawn, scored), (again, drawn_again, scored_again) = found
    assert steps == again
    assert drawn == drawn_again
    for one, other in zip(scored, scored_again, strict=True):
        np.testing.assert_array_equal(one, other)
