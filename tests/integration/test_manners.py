"""The unmodified SDK at a real stack with small limits: it waits where that helps, and says what
is wrong where it does not."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import tinker
from tinker import types

from tests.support.sdk import adam, params, sequences, supervised
from tests.support.stacks import TIED, TestStack, running

LIMITS = {
    "trainer_ranks": "1",
    "limit_runs": "1",
    "limit_queued_operations": "4",
    "limit_waiting_samples": "4",
    "limit_checkpoint_bytes": "1000",
}
AT_ONCE = 30.0
"""Seconds: the SDK repeats what it may for five minutes."""


@pytest.fixture(scope="module")
def limited(
    models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TestStack]:
    with running(tmp_path_factory.mktemp("manners"), models=models, settings=LIMITS) as stack:
        yield stack


@pytest.fixture(scope="module")
def service(limited: TestStack) -> Iterator[tinker.ServiceClient]:
    with limited.service() as service:
        yield service


@pytest.fixture(scope="module")
def training(service: tinker.ServiceClient) -> tinker.TrainingClient:
    return service.create_lora_training_client(TIED, rank=8).result(timeout=300)


def refused(limited: TestStack, limit: str) -> float:
    with limited.stack.client() as client:
        text = client.get(f"{limited.stack.endpoint.url}/metrics").text
    line = f'tandem_gateway_refusals_total{{limit="{limit}"}} '
    return sum(float(each.removeprefix(line)) for each in text.splitlines() if line in each)


def test_ten_times_more_operations_than_may_wait_are_all_carried_out_in_order(
    limited: TestStack, training: tinker.TrainingClient
) -> None:
    batch = [supervised(tokens) for tokens in sequences(4, seed=1)]
    losses, steps = [], []
    for _ in range(20):
        losses.append(training.forward_backward(batch, "cross_entropy"))
        steps.append(training.optim_step(adam(1e-2)))
    found = [future.result(timeout=300).metrics["loss:sum"] for future in losses]
    for future in steps:
        future.result(timeout=300)
    assert found[-1] < found[0]
    assert refused(limited, "queued_operations") > 0


def test_ten_times_more_samples_than_may_wait_are_all_drawn(
    limited: TestStack, service: tinker.ServiceClient, training: tinker.TrainingClient
) -> None:
    sampling = service.create_sampling_client(base_model=TIED).result(timeout=300)
    prompt = types.ModelInput.from_ints([10, 20, 30])
    futures = [sampling.sample(prompt, 1, params(tokens=4, seed=n)) for n in range(40)]
    answers = [future.result(timeout=300) for future in futures]
    assert all(len(answer.sequences[0].tokens) <= 4 for answer in answers)
    assert refused(limited, "waiting_samples") > 0


def test_a_limit_is_told_at_once_in_a_sentence(
    service: tinker.ServiceClient, training: tinker.TrainingClient
) -> None:
    started = time.monotonic()
    with pytest.raises(tinker.PermissionDeniedError, match="limit of runs is 1"):
        service.create_lora_training_client(TIED, rank=8).result(timeout=300)
    with pytest.raises(tinker.RequestFailedError, match="limit of checkpoint bytes is 1000") as e:
        training.save_state("state").result(timeout=300)
    assert e.value.category is types.RequestErrorCategory.User
    assert time.monotonic() - started < AT_ONCE
