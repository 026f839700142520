from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from tandem.protocol.worker import LoraSpec
from tandem.v1 import trainer_pb2
from tests.support.local_trainer import (
    SPEC,
    data_of,
    forward_backward,
    load,
    logprobs,
    make,
    save,
    train,
    weights,
)
from tests.support.tiny_model import write_tiny_model


@pytest.fixture(scope="module")
def other(tmp_path_factory) -> Path:
    """Another base model with the same layers."""
    return write_tiny_model(tmp_path_factory.mktemp("models") / "other", seed=1)


def moments(operations) -> dict[str, torch.Tensor]:
    state = operations.trainer.backend.optimizer.state(create=False)
    return {name: tensor.clone() for name, tensor in state.items()}


def steps(operations, count: int, *, seed: int, optimizer: str) -> list[float]:
    if optimizer == "adamw":
        return train(operations, count, seed=seed)
    losses = []
    for number in range(seed, seed + count):
        losses.append(forward_backward(operations, data_of(number)).metrics["loss:sum"])
        muon = trainer_pb2.DiMuonParams(learning_rate=1e-2, beta1=0.9)
        reply = operations.optim_step(trainer_pb2.OptimStepRequest(dimuon=muon))
        assert not reply.HasField("failure"), reply.failure
    return losses


@pytest.mark.parametrize("optimizer", ["adamw", "dimuon"])
@pytest.mark.parametrize("lora", [None, SPEC], ids=["full", "lora"])
def test_resumed_training_is_uninterrupted_training_bit_for_bit(models, tmp_path, lora, optimizer):
    whole = make(models["qwen3"], lora, optimizer=optimizer)
    steps(whole, 2, seed=0, optimizer=optimizer)
    save(whole, tmp_path / "a")
    losses = steps(whole, 2, seed=2, optimizer=optimizer)

    other_seed = lora.model_copy(update={"seed": 99}) if lora else None
    resumed = make(models["qwen3"], other_seed, optimizer=optimizer)
    assert load(resumed, tmp_path / "a").step == 2
    assert steps(resumed, 2, seed=2, optimizer=optimizer) == losses
    for here, there in ((weights(whole), weights(resumed)), (moments(whole), moments(resumed))):
        assert here.keys() == there.keys() and here
        assert all(torch.equal(tensor, there[name]) for name, tensor in here.items())
    after = data_of(7)
    np.testing.assert_array_equal(logprobs(whole, after), logprobs(resumed, after))


@pytest.mark.parametrize("lora", [None, SPEC], ids=["full", "lora"])
def test_without_the_optimizer_only_the_weights_come_back(models, tmp_path, lora):
    trainer = make(models["qwen3"], lora)
    train(trainer, 2)
    saved = weights(trainer)
    save(trainer, tmp_path / "a")
    train(trainer, 1)
    assert not load(trainer, tmp_path / "a", optimizer=False).HasField("failure")
    assert all(torch.equal(tensor, saved[name]) for name, tensor in weights(trainer).items())
    assert moments(trainer) == {}


def test_the_checkpoint_of_a_lora_run_holds_the_adapter_and_its_moments_alone(models, tmp_path):
    lora, full = make(models["qwen3"]), make(models["qwen3"], None)
    for name, trainer in (("lora", lora), ("full", full)):
        train(trainer, 1)
        save(trainer, tmp_path / name)
    record = json.loads((tmp_path / "lora" / "checkpoint.json").read_text())
    adapted = {name: list(t.shape) for name, t in weights(lora).items() if ".lora_" in name}
    assert record["parameters"] == adapted
    assert record["training"]["lora"]["rank"] == SPEC.rank
    assert record["base_model"] == "tiny"
    trained = sum(t.numel() for n, t in weights(lora).items() if ".lora_" in n)
    tensors = sum(1 for _ in adapted)
    size = sum(file.stat().st_size for file in (tmp_path / "lora").glob("*.safetensors"))
    assert 12 * trained < size < 12 * trained + 3 * tensors * 3000  # each has its own header


# --- Misfits ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(models, tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("saved")
    for name, lora in (("lora", SPEC), ("full", None)):
        trainer = make(models["qwen3"], lora, name="the base")
        train(trainer, 1)
        save(trainer, root / name)
    return {path.name: path for path in root.iterdir()}


@pytest.mark.parametrize(
    ("checkpoint", "lora", "sentence"),
    [
        ("lora", LoraSpec(rank=8), "holds LoRA of rank 4 .*, while this run trains LoRA of rank 8"),
        ("lora", LoraSpec(rank=4, alpha=8), "alpha 32 .* while .* alpha 8 "),
        ("lora", LoraSpec(rank=4, mlp=False), "on attention, mlp, unembedding, while .* on attent"),
        ("lora", None, "holds LoRA of rank 4 .*, while this run trains all parameters"),
        ("full", SPEC, "holds all parameters, while this run trains LoRA of rank 4"),
    ],
)
def test_a_checkpoint_of_other_training_is_refused(models, saved, checkpoint, lora, sentence):
    trainer = make(models["qwen3"], lora)
    before = weights(trainer)
    reply = load(trainer, saved[checkpoint])
    assert reply.failure.type == "checkpoint_mismatch"
    assert re.search(sentence, reply.failure.message), reply.failure.message
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(trainer).items())


def test_an_adapter_of_another_base_model_is_refused(other, saved):
    reply = load(make(other, name="another"), saved["lora"])
    assert reply.failure.type == "checkpoint_mismatch"
    assert "the base model the base, whose weights are not those of another" in (
        reply.failure.message
    )


def test_the_same_base_model_elsewhere_is_the_same(models, saved, tmp_path):
    shutil.copytree(models["qwen3"], tmp_path / "copy")
    assert load(make(tmp_path / "copy", name="renamed"), saved["lora"]).step == 1


@pytest.mark.parametrize("lora", ["lora", "full"])
def test_moments_of_another_optimizer_are_refused_unless_left_behind(models, saved, lora):
    trainer = make(models["qwen3"], SPEC if lora == "lora" else None, optimizer="dimuon")
    reply = load(trainer, saved[lora])
    assert reply.failure.type == "checkpoint_mismatch"
    assert "optimizer adamw, while this run uses dimuon; load it without" in reply.failure.message
    assert load(trainer, saved[lora], optimizer=False).step == 1
