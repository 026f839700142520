"""Uses a gateway through the SDK: datums, training runs, samples, refusals."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import httpx
import numpy as np
import pytest
import tinker
from numpy.typing import NDArray
from tinker import SamplingClient, ServiceClient, TrainingClient, types
from tinker.proto.request_conv import forward_backward_request_to_proto

from tandem.wire.v1 import tinker_pb2 as wire
from tests.support.stacks import VOCABULARY

Floats = NDArray[np.float32]

START = "start"

TIMEOUT = 240.0
SOON = 90.0
"""The limit for a refusal. The SDK retries for five minutes."""


def sequences(count: int, *, seed: int, shortest: int = 4, longest: int = 24) -> list[list[int]]:
    """Return random token sequences of different lengths."""
    random = np.random.default_rng(seed)
    return [
        random.integers(3, VOCABULARY, random.integers(shortest, longest + 1)).tolist()
        for _ in range(count)
    ]


def datum(tokens: list[int], *, targets: object = None, **inputs: Floats) -> types.Datum:
    """Return a datum that predicts each next token, or `targets`. `inputs` are arrays by name."""
    chosen = np.array(tokens[1:] if targets is None else targets, dtype=np.int64)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            name: types.TensorData.from_numpy(value)
            for name, value in {"target_tokens": chosen, **inputs}.items()
        },
    )


def request_of(
    data: list[types.Datum], loss: str, settings: dict[str, float | str] | None = None
) -> wire.ForwardBackwardRequest:
    body = types.ForwardBackwardInput(data=data, loss_fn=loss, loss_fn_config=settings)
    return forward_backward_request_to_proto(
        types.ForwardBackwardRequest(model_id="run", seq_id=1, forward_backward_input=body)
    )


def supervised(tokens: list[int], *, weight: float = 1.0) -> types.Datum:
    return datum(tokens, weights=np.full(len(tokens) - 1, weight, dtype=np.float32))


def batch(
    loss: str, tokens: list[list[int]], *, old: list[Floats], seed: int = 0
) -> list[types.Datum]:
    """Return datums for any loss. `old` are the sampling policy's logprobs."""
    if loss == "cross_entropy":
        return [supervised(sequence, weight=0.5) for sequence in tokens]
    random = np.random.default_rng(seed)
    return [
        datum(
            sequence,
            # About a fifth off, so that some ratios are clipped.
            logprobs=(logprobs + random.normal(0, 0.2, len(logprobs))).astype(np.float32),
            advantages=random.normal(0, 1, len(logprobs)).astype(np.float32),
        )
        for sequence, logprobs in zip(tokens, old, strict=True)
    ]


# --- Training --------------------------------------------------------------------------------


def start_runs(service: ServiceClient, *models: str) -> dict[str, TrainingClient]:
    """Start a training run for each model at once, and save each beginning."""
    futures = {name: service.create_lora_training_client(f"{name}:full") for name in models}
    clients = {name: future.result(timeout=240) for name, future in futures.items()}
    for saved in [client.save_state(START) for client in clients.values()]:
        saved.result(timeout=60)
    return clients


def rewind(training: TrainingClient) -> TrainingClient:
    """Return to the beginning, with a fresh optimizer."""
    load_state(training, f"tinker://{training.model_id}/weights/{START}").result(timeout=60)
    return training


def load_state(
    training: TrainingClient, path: str, *, optimizer: bool = False, token: str | None = None
) -> tinker.APIFuture[types.LoadWeightsResponse]:
    """Load a state into this run. The SDK has deprecated its method, but not removed it."""
    method = training.load_state_with_optimizer if optimizer else training.load_state
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return method(path, weights_access_token=token)


def logprobs(training: TrainingClient, tokens: list[list[int]]) -> list[Floats]:
    """Return the trainer's logprobs of tokens[1:], [length - 1], without training."""
    future = training.forward([supervised(sequence) for sequence in tokens], "cross_entropy")
    return outputs(future.result(timeout=TIMEOUT))


def outputs(result: types.ForwardBackwardOutput) -> list[Floats]:
    return [np.array(out["logprobs"].data, np.float32) for out in result.loss_fn_outputs]


def adam(rate: float = 1e-2) -> types.AdamParams:
    # With the usual eps, Adam's first step is the gradient's sign, and a rounding residue would
    # become a whole step.
    return types.AdamParams(learning_rate=rate, beta1=0.9, beta2=0.99, eps=1e-3)


def train(training: TrainingClient, *, seed: int, steps: int = 3, rate: float = 1e-2) -> None:
    """Move the weights far enough to distinguish old from new."""
    data = [supervised(tokens) for tokens in sequences(8, seed=seed)]
    pending = []
    for _ in range(steps):
        pending += [
            training.forward_backward(data, "cross_entropy"),
            training.optim_step(types.AdamParams(learning_rate=rate)),
        ]
    for future in pending:
        future.result(timeout=TIMEOUT)


def largest_difference(left: list[Floats], right: list[Floats]) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(left, right, strict=True))


# --- Sampling --------------------------------------------------------------------------------


def params(*, tokens: int = 8, seed: int | None = None, temperature: float = 1.0):
    # No stops: the end-of-sequence token does not end a sample either.
    return types.SamplingParams(max_tokens=tokens, seed=seed, temperature=temperature, stop=[])


def sample(
    sampler: SamplingClient, prompt: list[int], *, count: int = 1, **settings
) -> list[types.SampledSequence]:
    future = sampler.sample(
        types.ModelInput.from_ints(prompt), num_samples=count, sampling_params=params(**settings)
    )
    return list(future.result(timeout=TIMEOUT).sequences)


def prompt_logprobs(sampler: SamplingClient, tokens: list[list[int]]) -> list[Floats]:
    """Return the sampler's logprobs in the form of `logprobs`."""
    futures = [sampler.compute_logprobs(types.ModelInput.from_ints(each)) for each in tokens]
    found = []
    for future in futures:
        answer = future.result(timeout=TIMEOUT)
        assert answer[0] is None, "the first token has no logprob"
        found.append(np.array(answer[1:], np.float32))
    return found


# --- The command line ------------------------------------------------------------------------


def run_tinker(url: str, key: str, *arguments: str) -> None:
    environment = {**os.environ, "TINKER_BASE_URL": url, "TINKER_API_KEY": key}
    command = [sys.executable, "-m", "tinker.cli", "-f", "json", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr


# --- Refusals --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Refusal:
    """`status` is the HTTP status, or 200 for an accepted operation that failed."""

    type: str
    message: str
    category: str
    status: int


def refusal(action: Callable[[], object]) -> Refusal:
    """Run an SDK call that must raise."""
    with pytest.raises((tinker.RequestFailedError, tinker.APIStatusError)) as caught:
        action()
    error = caught.value
    if isinstance(error, tinker.RequestFailedError):
        # The SDK's words come first, then the server's "type: sentence".
        type_, _, message = error.message.partition("Request failed: ")[2].partition(": ")
        return Refusal(type=type_, message=message, category=str(error.category), status=200)
    return refusal_of(error.response)


def refusal_of(answer: httpx.Response) -> Refusal:
    body = answer.json()
    assert 400 <= answer.status_code < 500, (answer.status_code, body)
    return Refusal(
        type=body["type"],
        message=body["error"],
        category=body["category"],
        status=answer.status_code,
    )
