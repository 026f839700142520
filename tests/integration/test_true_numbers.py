"""The recorded numbers of real steps: losses, gaps and where the time went."""

from __future__ import annotations

import time
from datetime import datetime
from itertools import pairwise

import numpy as np
import pytest
from tinker import TrainingClient

from tests.support.sdk import TIMEOUT, adam, datum, outputs, sample, sequences, supervised
from tests.support.stacks import TestStack

TOLERANCE = 1e-4


def steps_of(stack: TestStack, training: TrainingClient, *, last: int) -> list[dict]:
    with stack.stack.client() as client:
        answer = client.get(f"runs/{training.model_id}/steps?limit={last}")
        return answer.raise_for_status().json()["steps"]


def test_the_numbers_of_policy_steps_are_those_of_the_clients_own_logprobs(
    stack: TestStack, run: TrainingClient
) -> None:
    expected = []
    for step in range(3):
        sampler = run.save_weights_and_get_sampling_client().result(timeout=TIMEOUT)
        data, given, chosen = [], [], []
        for index, prompt in enumerate(sequences(3, seed=step)):
            for sequence in sample(sampler, prompt, count=2, tokens=8, seed=index):
                known = [0.0] * (len(prompt) - 1) + list(sequence.logprobs)
                mask = [0.0] * (len(prompt) - 1) + [1.0] * len(sequence.tokens)
                tokens = prompt + list(sequence.tokens)
                advantages = np.array(mask, np.float32) * (1.0 if index % 2 else -1.0)
                mu = np.array(known, np.float32)
                data.append(datum(tokens, logprobs=mu, advantages=advantages))
                given += known
                chosen += mask
        time.sleep(0.2)  # the client thinks
        computed = run.forward_backward(data, "importance_sampling").result(timeout=TIMEOUT)
        run.optim_step(adam(1e-3)).result(timeout=TIMEOUT)
        trained = np.array(chosen) != 0
        mu, p = np.array(given)[trained], np.concatenate(outputs(computed))[trained]
        expected.append((mu, p))
    steps = steps_of(stack, run, last=3)
    for (mu, p), step in zip(expected, steps, strict=True):
        numbers = step["metrics"]
        assert numbers["gap_max"] == pytest.approx(np.abs(p - mu).max(), abs=1e-6)
        assert numbers["gap_max"] < TOLERANCE, "the sampler has the trainer's weights"
        assert numbers["gap_mean"] == pytest.approx(np.abs(p - mu).mean(), abs=1e-6)
        assert numbers["kl_mean"] == pytest.approx((mu - p).mean(), abs=1e-6)
        assert numbers["entropy"] == pytest.approx(-mu.mean(), rel=1e-5)
        assert numbers["answer_tokens"] == 8 and numbers["staleness"] == 0
        assert "loss" not in numbers and "clipped_share" not in numbers
    for before, after in pairwise(steps):
        numbers = after["metrics"]
        at = [datetime.fromisoformat(each["at"]) for each in (before, after)]
        shares = {k: v for k, v in numbers.items() if k.startswith("seconds/")}
        whole = shares.pop("seconds/step")
        assert sum(shares.values()) == pytest.approx(whole, rel=1e-6)
        assert whole == pytest.approx((at[1] - at[0]).total_seconds(), rel=0.03)
        assert shares["seconds/client"] >= 0.2
        for name in ("samples", "compute", "publish", "weights"):
            assert shares[f"seconds/{name}"] > 0, name


def test_the_loss_of_supervised_steps_is_that_of_trained_tokens(
    stack: TestStack, run: TrainingClient
) -> None:
    data = [supervised(tokens) for tokens in sequences(4, seed=5)]
    computed = run.forward_backward(data, "cross_entropy").result(timeout=TIMEOUT)
    run.optim_step(adam(1e-3)).result(timeout=TIMEOUT)
    (step,) = steps_of(stack, run, last=1)
    weights = np.concatenate([each.loss_fn_inputs["weights"].to_numpy() for each in data])
    logprobs = np.concatenate(outputs(computed))
    mean = -(weights * logprobs).sum() / weights.sum()
    assert step["metrics"]["loss"] == pytest.approx(mean, rel=1e-5)
