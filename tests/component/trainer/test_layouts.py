"""Ranks with replicas of a model, and ranks that divide its matrices."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tandem.protocol.worker import Layout, LoraSpec, TrainingSpec
from tandem.weights import open_version
from tests.support.architectures import write_model
from tests.support.losses.batches import mixed_data
from tests.support.tiny_model import VOCABULARY
from tests.support.trainer_worker import TrainerClient, logprobs_of, request, trainer_process

pytestmark = pytest.mark.slow

COMPILE_SECONDS = 900.0
COMPILED = [pytest.mark.nightly, pytest.mark.timeout(3 * COMPILE_SECONDS)]
SETTINGS = {"shard_group_parameters": 1, "micro_batch_tokens": 40}
Weights = dict[str, np.ndarray]


def train(client: TrainerClient, *numbers: int, snapshot: str = "") -> list[np.ndarray]:
    """Step on each batch, and return log probabilities. Clipping and a large epsilon keep last bits
    of small gradients from becoming steps."""
    found = []
    for number in numbers:
        found += logprobs_of(client.output(request(mixed_data(seed=number))))
        reply = client.optim_step(lr=1e-2, eps=1e-2, clip=0.5, snapshot=snapshot)
        assert not reply.HasField("failure"), reply.failure
    return found


def weights(client: TrainerClient, folder: Path, *, files: int) -> Weights:
    reply, path = client.publish(folder)
    assert not reply.HasField("failure"), reply.failure
    open_version(path, name=reply.version.name)
    written = list(path.glob("*.safetensors"))
    assert len(written) == files, "each rank writes its part, once; adapters are one file"
    return {name: array for file in written for name, array in load_file(file).items()}


def assert_close(found: Weights, expected: Weights) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), "qwen3")


@pytest.fixture(scope="module")
def alone(model, tmp_path_factory) -> Callable[[LoraSpec | None], tuple[list[np.ndarray], Weights]]:
    @cache
    def trained(lora: LoraSpec | None) -> tuple[list[np.ndarray], Weights]:
        folder = tmp_path_factory.mktemp("alone")
        with trainer_process(model, folder, **SETTINGS, training=TrainingSpec(lora=lora)) as client:
            return train(client, 1, 2, 3), weights(client, folder, files=1)

    return trained


@pytest.mark.parametrize(
    ("ranks", "layout", "lora", "less_memory"),
    [
        pytest.param(2, Layout(), None, {"offload": "weights"}, marks=pytest.mark.nightly),
        pytest.param(
            4,
            Layout(replicas=2, tensor_parallel=2),
            LoraSpec(rank=4, seed=5),
            {"offload": "weights"},
            marks=pytest.mark.nightly,
        ),
        pytest.param(2, Layout(replicas=2), None, {}, marks=pytest.mark.nightly),
        pytest.param(
            *(4, Layout(replicas=2), None, {"unreduced_gradients_bytes": 1}),
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            2,
            Layout(tensor_parallel=2),
            None,
            {"logits_bytes": 4 * VOCABULARY * 7},
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            4,
            Layout(tensor_parallel=2),
            None,
            {"checkpointing": "on", "unreduced_gradients_bytes": 1},
            marks=pytest.mark.nightly,
        ),
        (
            4,
            Layout(replicas=2, tensor_parallel=2),
            None,
            {"checkpointing": "on", "unreduced_gradients_bytes": 1},
        ),
        pytest.param(
            4,
            Layout(replicas=2, tensor_parallel=2),
            LoraSpec(rank=4, seed=5),
            {"checkpointing": "on", "logits_bytes": 4 * VOCABULARY * 7},
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            2,
            Layout(tensor_parallel=2),
            None,
            {"compile": "on", "checkpointing": "on"},
            marks=COMPILED,
        ),
        pytest.param(
            4,
            Layout(replicas=2, tensor_parallel=2),
            LoraSpec(rank=4, seed=5),
            {"compile": "on"},
            marks=COMPILED,
        ),
    ],
    ids=[
        "shards on the host",
        "adapters on copies of divided matrices on the host",
        "copies that are whole on a rank",
        "copies in two shards, gradients reduced at once",
        "divided matrices, logits in chunks",
        "divided matrices in two shards, checkpointed blocks, gradients reduced at once",
        "copies of divided matrices, checkpointed blocks, gradients reduced at once",
        "adapters on copies of divided matrices, checkpointed blocks, logits in chunks",
        "divided matrices, compiled and checkpointed blocks",
        "adapters on copies of divided matrices, compiled blocks",
    ],
)
def test_a_layout_computes_what_one_rank_computes_and_goes_on_from_a_snapshot_after_a_kill(
    model, tmp_path, alone, ranks, layout, lora, less_memory
) -> None:
    less_memory = {**less_memory}
    offload = less_memory.pop("offload", "none")  # a setting of the run, not of the trainer
    logprobs, expected = alone(lora)
    files = ranks if lora is None else 1
    snapshot = tmp_path / "snapshots" / "s2"
    training = TrainingSpec(layout=layout, lora=lora, offload=offload)
    settings = {**SETTINGS, **less_memory, "ranks": ranks, "training": training, "wait": False}
    with trainer_process(model, tmp_path, lease=1, **settings) as client:
        client.wait_until_serving(COMPILE_SECONDS)
        found = train(client, 1)
        found += train(client, 2, snapshot=str(snapshot))
        assert client.await_snapshot(str(snapshot)).step == 2
        client.hold(2)
        client.sleep(spill_folder=str(tmp_path / "spill"))
        client.hold(3)
        client.wake()
        found += train(client, 3)
        after = weights(client, tmp_path / "after", files=files)
        os.killpg(client.process.pid, signal.SIGKILL)
    for one, other in zip(logprobs, found, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-5)
    assert_close(after, expected)
    with trainer_process(model, tmp_path, **settings) as client:
        client.wait_until_serving(COMPILE_SECONDS)
        client.restore(str(snapshot), seq_id=4)
        train(client, 3)
        again = weights(client, tmp_path / "again", files=files)
    assert all(np.array_equal(again[name], after[name]) for name in after)
    with trainer_process(model, tmp_path, **SETTINGS, training=TrainingSpec(lora=lora)) as client:
        client.restore(str(snapshot), seq_id=4)
        train(client, 3)
        assert_close(weights(client, tmp_path / "one", files=1), expected)
