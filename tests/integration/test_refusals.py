"""Users' mistakes get clear, typed errors, and the run continues."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from tinker import ServiceClient, TrainingClient, types

from tests.support.sdk import (
    SOON,
    Floats,
    adam,
    datum,
    largest_difference,
    logprobs,
    outputs,
    params,
    refusal,
    sample,
    sequences,
    supervised,
    train,
)
from tests.support.stacks import MAX_LENGTH, TIED, VOCABULARY

TOKENS = [10, 20, 30, 40, 50]
N = len(TOKENS) - 1


def ones() -> Floats:
    return np.ones(N, np.float32)


@dataclass(frozen=True)
class Mistake:
    """A forward_backward that is refused with this `type`, in a sentence with `says`."""

    type: str
    says: str
    data: list[types.Datum]
    loss: str = "cross_entropy"
    settings: dict[str, float | str] | None = field(default=None)


NAN = np.array([0.0, np.nan, 0.0, 0.0], np.float32)
MISTAKES = {
    "a token outside the vocabulary": Mistake(
        "token_out_of_vocabulary", str(VOCABULARY), [supervised([10, VOCABULARY, 30])]
    ),
    "no advantages": Mistake(
        "loss_input_missing", "advantages", [datum(TOKENS, logprobs=ones())], "ppo"
    ),
    "weights that are not numbers": Mistake(
        "loss_input_not_finite", "weights", [datum(TOKENS, weights=NAN)]
    ),
    "a loss setting that is text": Mistake(
        "unknown_loss_setting",
        "clip_low_threshold",
        [datum(TOKENS, logprobs=-ones(), advantages=ones())],
        "ppo",
        {"clip_low_threshold": "low"},
    ),
    "more than the server takes at once": Mistake(
        "payload_too_large",
        "bytes",
        [supervised(t) for t in sequences(600, seed=1, shortest=200, longest=200)],
    ),
}
"""One for each part that refuses. The trainer's validation has its own tests."""


@pytest.mark.parametrize("name", MISTAKES)
def test_a_bad_batch_is_refused_and_the_step_after_it_changes_nothing(
    run: TrainingClient, name: str
) -> None:
    mistake = MISTAKES[name]
    probes = sequences(2, seed=161)
    before = logprobs(run, probes)
    good = run.forward_backward([supervised(TOKENS)], "cross_entropy")
    bad = run.forward_backward(mistake.data, mistake.loss, mistake.settings)
    step = run.optim_step(adam())

    refused = refusal(lambda: bad.result(timeout=SOON))
    assert (refused.type, refused.category) == (mistake.type, "user"), refused
    assert mistake.says in refused.message
    good.result(timeout=SOON)
    incomplete = refusal(lambda: step.result(timeout=SOON))
    assert (incomplete.type, incomplete.category) == ("gradients_incomplete", "user"), incomplete
    assert largest_difference(before, logprobs(run, probes)) == 0

    train(run, seed=162, steps=1)
    assert largest_difference(before, logprobs(run, probes)) > 1e-3, "it goes on working"


def test_a_custom_loss_that_fails_is_told_and_its_gradients_are_not_used(
    run: TrainingClient, service: ServiceClient
) -> None:
    def undefined(logprobs: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return torch.log(logprobs).sum(), {}

    before = logprobs(run, [TOKENS])
    handle = service.create_custom_loss(undefined, input_ranks={"logprobs": 1}).result(SOON)
    failed = refusal(lambda: run.forward_backward_custom([datum(TOKENS)], handle).result(SOON))
    assert (failed.type, failed.category) == ("custom_loss_failed", "user")
    assert "'undefined'" in failed.message
    assert "torch.log" in failed.message
    assert refusal(lambda: run.optim_step(adam()).result(SOON)).type == "gradients_incomplete"
    assert largest_difference(before, logprobs(run, [TOKENS])) == 0


def test_a_batch_without_a_datum_is_refused_by_the_client_itself(run: TrainingClient) -> None:
    with pytest.raises(ValueError):
        run.forward_backward([], "cross_entropy").result(timeout=SOON)
    assert outputs(run.forward([supervised(TOKENS)], "cross_entropy").result(timeout=SOON))


SAMPLES: dict[str, tuple[str, Callable[[], dict]]] = {
    "a token outside the vocabulary": (
        "token_out_of_vocabulary",
        lambda: {"prompt": [1, VOCABULARY], "sampling_params": params()},
    ),
    "prompt and samples longer than the model": (
        "sequence_too_long",
        lambda: {"prompt": [7] * 100, "sampling_params": params(tokens=MAX_LENGTH)},
    ),
    "a negative temperature": (
        "invalid_request",
        lambda: {"prompt": [7], "sampling_params": params(temperature=-1.0)},
    ),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_a_bad_sample_is_refused_and_the_next_one_is_served(
    run: TrainingClient, service: ServiceClient, name: str
) -> None:
    type_, arguments = SAMPLES[name]
    sampler = service.create_sampling_client(base_model=TIED).result(timeout=240)
    asked = {"num_samples": 1, **arguments()}
    asked["prompt"] = types.ModelInput.from_ints(asked["prompt"])
    refused = refusal(lambda: sampler.sample(**asked).result(timeout=SOON))
    assert (refused.type, refused.category) == (type_, "user"), refused
    assert len(sample(sampler, [7, 8], tokens=3)[0].tokens) == 3
