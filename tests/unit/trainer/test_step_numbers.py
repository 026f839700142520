"""The numbers of a step agree with numpy on the returned logprobs, however a step is divided."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from tandem.v1 import trainer_pb2
from tandem.wire.v1 import tinker_pb2 as wire
from tests.support.local_trainer import make
from tests.support.losses.batches import mixed_data
from tests.support.trainer_worker import datum, logprobs_of, request
from trainer_service.service.operations import Operations

DIVISIONS = {
    "one micro-batch": {},
    "several micro-batches": {"micro_batch_tokens": 24},
    "several micro-batches at once": {"micro_batch_tokens": 24, "parallel": 3},
}
POLICY = {"kl_mean", "kl_k3", "entropy", "gap_mean", "gap_max", "ratio_max", "answer_tokens"}


def step_of(
    operations: Operations, messages: Sequence[wire.ForwardBackwardRequest]
) -> tuple[dict[str, float], list[np.ndarray]]:
    """Return the numbers of a step of these requests, and the logprobs of their datums."""
    logprobs: list[np.ndarray] = []
    for message in messages:
        payload = message.SerializeToString()
        reply = operations.forward_backward(trainer_pb2.ForwardBackwardRequest(payload=payload))
        assert not reply.HasField("failure"), reply.failure
        logprobs += logprobs_of(wire.ForwardBackwardOutput.FromString(reply.output))
    adam = trainer_pb2.AdamWParams(learning_rate=0.0, beta1=0.9, beta2=0.95, eps=1e-8)
    step = operations.optim_step(trainer_pb2.OptimStepRequest(adamw=adam))
    assert not step.HasField("failure"), step.failure
    numbers = {name: value for name, value in step.batch_metrics.items() if ":" not in name}
    return numbers, logprobs


def values(data: Sequence[wire.Datum], name: str) -> np.ndarray:
    """Return an input of all datums, in float64."""
    parts = [np.frombuffer(each.loss_fn_inputs[name].dense, "<f4") for each in data]
    return np.concatenate(parts).astype(np.float64)


def flat(logprobs: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([each.ravel() for each in logprobs]).astype(np.float64)


def answer_tokens(data: Sequence[wire.Datum], chosen: np.ndarray) -> float:
    sizes = [len(each.loss_fn_inputs["target_tokens"].dense) // 8 for each in data]
    counts = [part.sum() for part in np.split(chosen, np.cumsum(sizes)[:-1])]
    return float(sum(counts) / sum(count > 0 for count in counts))


@pytest.mark.parametrize("division", DIVISIONS)
@pytest.mark.parametrize("seed", [1, 2])
def test_the_loss_of_cross_entropy_counts_trained_tokens_alone(models, division, seed):
    messages = []
    for number in range(3):
        data = mixed_data(8, seed=10 * seed + number)
        for each in data:  # prompts have the weight 0
            given = np.frombuffer(each.loss_fn_inputs["weights"].dense, "<f4").copy()
            given[: len(given) // 2] = 0
            each.loss_fn_inputs["weights"].dense = given.tobytes()
        messages.append(request(data))
    numbers, logprobs = step_of(make(models["qwen3"], **DIVISIONS[division]), messages)
    data = [each for message in messages for each in message.data]
    weights, p = values(data, "weights"), flat(logprobs)
    expected = {
        "loss": -(weights * p).sum() / weights.sum(),
        "answer_tokens": answer_tokens(data, weights != 0),
    }
    assert numbers == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("division", DIVISIONS)
@pytest.mark.parametrize("loss", ["importance_sampling", "ppo", "cispo", "gspo"])
def test_the_numbers_of_a_policy_loss_cover_the_tokens_with_an_advantage(models, division, loss):
    messages = [request(mixed_data(6, seed=number), loss) for number in range(3)]
    numbers, logprobs = step_of(make(models["qwen3"], **DIVISIONS[division]), messages)
    data = [each for message in messages for each in message.data]
    chosen = values(data, "mask") != 0
    p, mu = flat(logprobs), values(data, "logprobs")
    old = mu if loss == "importance_sampling" else values(data, "old_logprobs")
    x, gap = (p - old)[chosen], np.abs(p - mu)[chosen]
    expected = {
        "kl_mean": -x.mean(),
        "kl_k3": (np.exp(x) - x - 1).mean(),
        "entropy": -mu[chosen].mean(),
        "gap_mean": gap.mean(),
        "gap_max": gap.max(),
        "answer_tokens": answer_tokens(data, chosen),
    }
    if loss != "gspo":  # its ratio is that of a sequence
        expected["ratio_max"] = np.exp(x).max()
        r, a = np.exp(x), values(data, "advantages")[chosen]
        if loss == "ppo":
            outside = ((a > 0) & (r > 1.2)) | ((a < 0) & (r < 0.8))
            expected["clipped_share"] = outside.mean()
        elif loss == "cispo":
            expected["clipped_share"] = (r > 4).mean()
    assert numbers.keys() == POLICY | (
        {"clipped_share"} if loss != "importance_sampling" else set()
    )
    assert {name: numbers[name] for name in expected} == pytest.approx(expected, rel=1e-4)


def test_a_step_of_two_losses_has_the_numbers_of_both(models):
    supervised, policy = request(mixed_data(4, seed=1)), request(mixed_data(4, seed=2), "ppo")
    both, _ = step_of(make(models["qwen3"]), [supervised, policy])
    loss, _ = step_of(make(models["qwen3"]), [supervised])
    numbers, _ = step_of(make(models["qwen3"]), [policy])
    counted = {**loss, **numbers}
    del both["answer_tokens"], counted["answer_tokens"]
    assert both == pytest.approx(counted, rel=1e-5)


def test_weights_below_zero_and_pairs_have_no_loss_per_token(models):
    derivative = request([datum([1, 2, 3], weights=[0.5, -0.5, 1.0])])
    numbers, _ = step_of(make(models["qwen3"]), [derivative])
    assert numbers == {"answer_tokens": 3.0}
    numbers, _ = step_of(make(models["qwen3"]), [request(mixed_data(4), "dpo")])
    assert numbers.keys() == {"answer_tokens"}


def test_a_loss_without_the_samplers_logprobs_compares_nothing(models):
    data = [datum([1, 2, 3], advantages=[0.0, 1.0, 1.0])]
    numbers, _ = step_of(make(models["qwen3"]), [request(data, "stable_reinforce")])
    assert numbers == {"answer_tokens": 2.0}
