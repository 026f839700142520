"""Each mistake of a user is answered with a clear, typed error, and the run goes on working."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
from tinker import ServiceClient, TrainingClient, types

from tests.support.plain_http import PlainClient
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
from tests.support.stacks import MAX_LENGTH, TIED, VOCABULARY, TestStack

TOKENS = [10, 20, 30, 40, 50]
N = len(TOKENS) - 1


def ones() -> Floats:
    return np.ones(N, np.float32)


def with_target(token: int) -> types.Datum:
    targets = types.TensorData.from_numpy(np.array([token] * N, np.int64))
    prompt = types.ModelInput.from_ints(TOKENS[:-1])
    return types.Datum(model_input=prompt, loss_fn_inputs={"target_tokens": targets})


@dataclass(frozen=True)
class Mistake:
    """A forward_backward that must be refused as `type`, in a sentence that names `says`."""

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
    "a negative token": Mistake("token_out_of_vocabulary", "-1", [supervised([10, -1, 30])]),
    "a target outside the vocabulary": Mistake(
        "token_out_of_vocabulary", "target", [with_target(VOCABULARY + 7)]
    ),
    "a sequence longer than the model": Mistake(
        "sequence_too_long", str(MAX_LENGTH), [supervised([7] * (MAX_LENGTH + 2))]
    ),
    "a datum without a token": Mistake(
        "empty_batch",
        "datum 0",
        [types.Datum(model_input=types.ModelInput.empty(), loss_fn_inputs={})],
    ),
    "no target tokens": Mistake(
        "loss_input_missing",
        "target_tokens",
        [types.Datum(model_input=types.ModelInput.from_ints(TOKENS), loss_fn_inputs={})],
    ),
    "no advantages": Mistake(
        "loss_input_missing", "advantages", [datum(TOKENS, logprobs=ones())], "ppo"
    ),
    "no logprobs": Mistake(
        "loss_input_missing", "logprobs", [datum(TOKENS, advantages=ones())], "cispo"
    ),
    "weights of the wrong shape": Mistake(
        "loss_input_shape", "weights", [datum(TOKENS, weights=np.ones(N + 1, np.float32))]
    ),
    "advantages of the wrong shape in the second datum": Mistake(
        "loss_input_shape",
        "datum 1",
        [
            datum(TOKENS, logprobs=-ones(), advantages=ones()),
            datum(TOKENS, logprobs=-ones(), advantages=np.ones((N, 2), np.float32)),
        ],
        "importance_sampling",
    ),
    "weights that are not numbers": Mistake(
        "loss_input_not_finite", "weights", [datum(TOKENS, weights=NAN)]
    ),
    "advantages that are infinite": Mistake(
        "loss_input_not_finite",
        "advantages",
        [datum(TOKENS, logprobs=-ones(), advantages=ones() * np.inf)],
        "importance_sampling",
    ),
    "an unknown loss": Mistake("unknown_loss", "pppo", [supervised(TOKENS)], "pppo"),
    "an unknown loss setting": Mistake(
        "unknown_loss_setting",
        "clip",
        [datum(TOKENS, logprobs=-ones(), advantages=ones())],
        "ppo",
        {"clip": 0.2},
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


def test_a_batch_without_a_datum_is_refused_by_the_client_itself(run: TrainingClient) -> None:
    with pytest.raises(ValueError):
        run.forward_backward([], "cross_entropy").result(timeout=SOON)
    assert outputs(run.forward([supervised(TOKENS)], "cross_entropy").result(timeout=SOON))


def test_an_unknown_model_is_refused(service: ServiceClient) -> None:
    refused = refusal(
        lambda: service.create_lora_training_client("no/such-model:full").result(timeout=SOON)
    )
    assert (refused.type, refused.category) == ("unknown_model", "user")
    assert "no/such-model" in refused.message
    assert TIED in refused.message, "the sentence says what there is"


def test_an_unknown_model_cannot_be_sampled_either(service: ServiceClient) -> None:
    refused = refusal(
        lambda: service.create_sampling_client(base_model="no/such-model").result(timeout=SOON)
    )
    assert (refused.type, refused.status) == ("unknown_model", 404)


@pytest.mark.parametrize("rank", [0, 513])
def test_a_lora_rank_out_of_range_is_refused(service: ServiceClient, rank: int) -> None:
    refused = refusal(
        lambda: service.create_lora_training_client(TIED, rank=rank).result(timeout=SOON)
    )
    assert (refused.type, refused.category) == ("invalid_request", "user")
    assert "lora_config.rank" in refused.message


def test_full_parameter_training_may_be_asked_for_by_metadata(stack: TestStack) -> None:
    client = PlainClient(stack.stack.endpoint)
    session_id = client.create_session()
    body = {
        "session_id": session_id,
        "model_seq_id": 0,
        "base_model": TIED,
        "lora_config": {"rank": 32},
        "user_metadata": {"tandem_training": "half"},
    }
    assert client.http.post("create_model", json=body).status_code == 400
    body["user_metadata"] = {"tandem_training": "full"}
    assert client.post("create_model", body) == f"{session_id}:train:0:0"
    client.finish(session_id)


def test_weights_that_do_not_exist_are_refused(service: ServiceClient, run: TrainingClient) -> None:
    missing = f"tinker://{run.model_id}/weights/never-saved"
    refused = refusal(
        lambda: service.create_training_client_from_state(missing).result(timeout=SOON)
    )
    assert (refused.type, refused.category) == ("unknown_weights", "user")
    missing = f"tinker://{run.model_id}/sampler_weights/never-saved"
    refused = refusal(
        lambda: service.create_sampling_client(model_path=missing).result(timeout=SOON)
    )
    assert refused.type == "unknown_weights"


def test_a_checkpoint_is_not_overwritten_unless_asked(run: TrainingClient) -> None:
    run.save_state("once", overwrite=True).result(timeout=SOON)
    refused = refusal(lambda: run.save_state("once").result(timeout=SOON))
    assert (refused.type, refused.category) == ("name_taken", "user")
    run.save_state("once", overwrite=True).result(timeout=SOON)


def test_an_optimizer_setting_out_of_range_is_refused(run: TrainingClient) -> None:
    run.forward_backward([supervised(TOKENS)], "cross_entropy").result(timeout=SOON)
    bad = types.AdamParams(learning_rate=1e-3, beta1=1.5)
    refused = refusal(lambda: run.optim_step(bad).result(timeout=SOON))
    assert refused.category == "user"
    assert "beta1" in refused.message


SAMPLES: dict[str, tuple[str, Callable[[], dict]]] = {
    "a token outside the vocabulary": (
        "token_out_of_vocabulary",
        lambda: {"prompt": [1, VOCABULARY], "sampling_params": params()},
    ),
    "a prompt longer than the model": (
        "sequence_too_long",
        lambda: {"prompt": [7] * (MAX_LENGTH + 1), "sampling_params": params()},
    ),
    "prompt and samples longer than the model": (
        "sequence_too_long",
        lambda: {"prompt": [7] * 100, "sampling_params": params(tokens=MAX_LENGTH)},
    ),
    "an empty prompt": ("empty_batch", lambda: {"prompt": [], "sampling_params": params()}),
    "a negative temperature": (
        "invalid_request",
        lambda: {"prompt": [7], "sampling_params": params(temperature=-1.0)},
    ),
    "no sample at all": (
        "invalid_request",
        lambda: {"prompt": [7], "sampling_params": params(), "num_samples": 0},
    ),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_a_bad_sample_is_refused_and_the_next_one_is_served(
    run: TrainingClient, service: ServiceClient, name: str
) -> None:
    type_, arguments = SAMPLES[name]
    sampler = service.create_sampling_client(base_model=TIED).result(timeout=120)
    asked = {"num_samples": 1, **arguments()}
    asked["prompt"] = types.ModelInput.from_ints(asked["prompt"])
    refused = refusal(lambda: sampler.sample(**asked).result(timeout=SOON))
    assert (refused.type, refused.category) == (type_, "user"), refused
    assert len(sample(sampler, [7, 8], tokens=3)[0].tokens) == 3
