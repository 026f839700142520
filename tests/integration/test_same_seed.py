"""One seed gives equal samples, rewards, losses and log probabilities, to the last bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tandem.demo.addition import REINFORCEMENT, reward, sums
from tandem.demo.tiny_model import write_tiny_model
from tandem.rl import train
from tests.support.sdk import outputs, sequences, supervised
from tests.support.stacks import running

pytestmark = pytest.mark.nightly

NAME = "tiny"
SHORT = replace(REINFORCEMENT, steps=2, group_size=4, substeps=2, epochs=2, seed=3)


class _Drawn:
    """Keeps the tokens and log probabilities of all rollouts."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, list[int], list[float]]] = []

    def log(self, step, values): ...

    def rollouts(self, step, rollouts):
        self.rows += [(step, each["tokens"], each["logprobs"]) for each in rollouts]


def test_two_runs_of_a_seed_are_one_and_the_same(tmp_path: Path):
    write_tiny_model(tmp_path / "model", seed=3)
    found = []
    with running(tmp_path, models={NAME: tmp_path / "model"}) as stack:
        for _ in range(2):
            with stack.service() as service:
                client = service.create_lora_training_client(f"{NAME}:full").result()
                drawn = _Drawn()
                done = train(client, sums(), reward, SHORT, tracked=drawn)
                steps = [(step.reward, step.metrics["loss:sum"]) for step in done.steps]
                data = [supervised(each) for each in sequences(6, seed=1)]
                scored = outputs(client.forward(data, "cross_entropy").result())
                found.append((steps, drawn.rows, scored))
    (steps, drawn, scored), (again, drawn_again, scored_again) = found
    assert steps == again
    assert len(drawn) == 800 and drawn == drawn_again
    for one, other in zip(scored, scored_again, strict=True):
        np.testing.assert_array_equal(one, other)
