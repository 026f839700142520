"""A single rank's bfloat16 copies of its float32 weights give the bits of FSDP's casts."""

from __future__ import annotations

import pytest
import torch

from tandem.backends.memory import TrainerMemory
from tests.support.architectures import write_model
from tests.support.local_trainer import (
    SPEC,
    assert_same,
    data_of,
    forward_backward,
    gradients,
    load,
    logprobs,
    make,
    publish,
    save,
    step,
    train,
    weights,
)
from tests.support.tiny_model import VOCABULARY
from trainer_service.backends.copies import CopiedWeights
from trainer_service.service.operations import Operations

pytestmark = pytest.mark.usefixtures("group")


def sharded(monkeypatch, *given, **settings) -> Operations:
    with monkeypatch.context() as patched:
        patched.setattr(TrainerMemory, "may_copy", False)
        patched.setattr(TrainerMemory, "sharded", lambda *_, **__: True)
        made = make(*given, dtype="bfloat16", micro_batch_tokens=24, **settings)
        assert made.trainer.backend._mesh is not None
    return made


def alone(*given, **settings) -> Operations:
    made = make(*given, dtype="bfloat16", micro_batch_tokens=24, **settings)
    assert made.trainer.backend._mesh is None
    return made


@pytest.mark.parametrize(
    ("architecture", "lora", "settings"),
    [
        ("qwen3", None, {}),
        ("gpt_neox", None, {"logits_bytes": 4 * VOCABULARY * 7, "checkpointing": "on"}),
        ("qwen3_moe", None, {"packing": "off"}),
        ("llama", SPEC, {}),
        ("qwen3", None, {"states": "bfloat16"}),
    ],
    ids=["tied", "in chunks, checkpointed", "experts, padded", "adapters", "states in bfloat16"],
)
def test_a_rank_alone_computes_the_bits_of_fsdp(
    models, tmp_path, monkeypatch, architecture, lora, settings
):
    mine = alone(models[architecture], lora, **settings)
    theirs = sharded(monkeypatch, models[architecture], lora, **settings)
    for number in range(2):
        for seed in (number, number + 10):
            answers = [forward_backward(each, data_of(seed, 12)) for each in (mine, theirs)]
            assert answers[0] == answers[1]
        assert_same(gradients(mine.trainer), gradients(theirs.trainer))
        assert step(mine, clip=0.5) == step(theirs, clip=0.5)
        assert (logprobs(mine, data_of(7)) == logprobs(theirs, data_of(7))).all()
    assert_same(weights(mine), weights(theirs))
    for name, each in (("mine", mine), ("theirs", theirs)):
        publish(each, tmp_path / name)
    for file in (tmp_path / "theirs").glob("*.safetensors"):
        assert file.read_bytes() == (tmp_path / "mine" / file.name).read_bytes()


def test_a_checkpoint_of_either_is_one_of_the_other(model, tmp_path, monkeypatch):
    mine, theirs = alone(model, None), sharded(monkeypatch, model, None)
    train(mine, 2)
    save(mine, tmp_path / "mine")
    assert not load(theirs, tmp_path / "mine").HasField("failure")
    train(theirs, 1, seed=5)
    save(theirs, tmp_path / "theirs")
    assert not load(mine, tmp_path / "theirs").HasField("failure")
    assert (logprobs(mine, data_of(3)) == logprobs(theirs, data_of(3))).all()
    assert train(mine, 1, seed=6) == train(theirs, 1, seed=6)


def test_copies_for_which_there_is_no_memory_are_not_made(tmp_path):
    model = write_model(tmp_path, "qwen3", num_hidden_layers=12)
    settings = {"dtype": "bfloat16", "shard_group_parameters": 1, "micro_batch_tokens": 60}
    large = make(model, None, **settings)
    roomy = large.trainer.backend.plan
    memory = sum(roomy.device.values()) - 2000
    tight = make(model, None, memory_bytes=memory, **settings)
    assert "copies" in roomy.device
    assert "copies" not in tight.trainer.backend.plan.device
    assert not tight.trainer.backend.plan.checkpointing
    assert train(tight, 1) == train(large, 1)
    both = make(model, None, dtype="bfloat16", micro_batch_tokens=24, checkpointing="on")
    assert "copies" in both.trainer.backend.plan.device


def test_copies_stay_tied_and_gradients_go_to_the_masters_at_once():
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 3), "b": torch.nn.Linear(3, 3)})
    model["b"].weight = model["a"].weight
    weight = model["a"].weight
    copied = CopiedWeights(model, dtype=torch.bfloat16)
    assert list(copied.masters) == ["a.weight", "a.bias", "b.bias"]
    for times in (1, 2):
        model["b"](model["a"](torch.ones(1, 3, dtype=torch.bfloat16))).sum().backward()
        assert all(each.grad is None for each in model.parameters())
        assert copied.masters["b.bias"].grad.tolist() == [times] * 3
    with torch.no_grad():
        copied.masters["a.weight"].add_(1.0)
    copied.refresh()
    assert model["b"].weight is weight
    assert torch.equal(weight.data, copied.masters["a.weight"].detach().bfloat16())
