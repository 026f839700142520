"""Old weights and old data are refused or left out, through the real SDK, trainer and engine."""

from __future__ import annotations

import re

import numpy as np
import pytest
import tinker
from tinker import TrainingClient, types

from tests.support.sdk import SOON, TIMEOUT, datum, outputs, sequences, train
from tests.support.stacks import TestStack

PARAMS = types.SamplingParams(max_tokens=4)
PROMPT = types.ModelInput.from_ints([5, 6, 7, 8])
AGES = [0, 1, 2, 3, 4, 5]


def test_a_stale_sample_fails_at_once_and_stale_data_are_not_trained(
    run: TrainingClient, stack: TestStack
) -> None:
    old = run.save_weights_and_get_sampling_client().result(timeout=TIMEOUT)
    first = old.sample(PROMPT, 1, PARAMS).result(timeout=TIMEOUT).sequences[0]
    session_id = first.sequence_id.rsplit(":", 2)[0]
    with stack.stack.client() as client:
        bounds = {"max_staleness": 2}
        client.patch(f"sampling_sessions/{session_id}", json=bounds).raise_for_status()
        train(run, seed=401, steps=2)
        assert old.sample(PROMPT, 1, PARAMS).result(timeout=TIMEOUT).sequences
        before = samples_asked(stack)
        train(run, seed=403, steps=3)
        with pytest.raises(tinker.APIStatusError) as refused:
            old.sample(PROMPT, 1, PARAMS).result(timeout=SOON)
        assert refused.value.status_code == 412
        assert "is 5 steps behind its trainer, and max_staleness is 2" in str(refused.value)
        assert samples_asked(stack) == before + 1, "the SDK sends it once"

        data = batch(step=5)
        kept = [each for each, age in zip(data, AGES, strict=True) if age <= 2]
        dropped = dropped_rollouts(stack)
        found = run.forward_backward(data, "importance_sampling", {"max_staleness": 2.0})
        found = found.result(timeout=TIMEOUT)
        assert found.metrics["dropped_stale:sum"] == 3.0
        assert dropped_rollouts(stack) == dropped + 3
        alone = run.forward(kept, "importance_sampling").result(timeout=TIMEOUT)
        assert found.metrics["loss:sum"] == alone.metrics["loss:sum"]
        rows = outputs(found)
        assert [len(row) for row in rows] == [len(each.model_input.to_ints()) for each in data]
        assert all(np.isnan(row).all() for row in rows[3:])
        for row, same in zip(rows[:3], outputs(alone), strict=True):
            np.testing.assert_array_equal(row, same)
        run.optim_step(types.AdamParams(learning_rate=1e-3)).result(timeout=TIMEOUT)

        strict = {"max_staleness": 2.0, "refuse_stale": 1.0}
        with pytest.raises(tinker.RequestFailedError, match="stale_version: datum 2") as failed:
            run.forward_backward(data, "importance_sampling", strict).result(timeout=SOON)
        assert failed.value.category is types.RequestErrorCategory.User
        assert dropped_rollouts(stack) == dropped + 3, "a refused batch drops nothing"
        # Without the refused batch no step is made.
        with pytest.raises(tinker.RequestFailedError, match="gradients_incomplete"):
            run.optim_step(types.AdamParams()).result(timeout=SOON)


def batch(*, step: int) -> list[types.Datum]:
    """A datum of each age, for a trainer at this step."""
    data = []
    for tokens, age in zip(sequences(len(AGES), seed=7), AGES, strict=True):
        count = len(tokens) - 1
        made = datum(
            tokens,
            logprobs=np.full(count, -3.0, np.float32),
            advantages=np.ones(count, np.float32),
        )
        steps = types.TensorData(data=[step - age], dtype="int64", shape=[1])
        made.loss_fn_inputs["weight_step"] = steps
        data.append(made)
    return data


def samples_asked(stack: TestStack) -> float:
    return total(stack, r'tandem_gateway_requests_total\{route="asample".*\} (\S+)')


def dropped_rollouts(stack: TestStack) -> float:
    return total(stack, r'tandem_rollouts_dropped_total\{reason="stale"\} (\S+)')


def total(stack: TestStack, line: str) -> float:
    """The sum of the gateway's counters that match."""
    with stack.stack.client() as client:
        text = client.get(f"{stack.stack.endpoint.url}/metrics").raise_for_status().text
    return sum(float(found) for found in re.findall(line, text))
