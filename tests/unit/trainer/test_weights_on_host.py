"""Weights on the host that come to the device by group give the bits of weights on the device.

Here both are one memory. `tests/component/trainer/test_weights_on_host.py` checks a GPU's."""

from __future__ import annotations

import pytest
from safetensors.torch import load_file

from tandem.errors import InvalidRequest
from tandem.protocol.worker import TrainingSpec
from tandem.v1 import trainer_pb2
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
from trainer_service.service.operations import Operations

pytestmark = pytest.mark.usefixtures("group")

WAYS = {
    "tied": ("qwen3", None, {}),
    "checkpointed": ("gpt_neox", None, {"checkpointing": "on"}),
    "experts, padded": ("qwen3_moe", None, {"packing": "off"}),
    "adapters": ("llama", SPEC, {}),
    "in bfloat16, in chunks": (
        "gpt_neox",
        None,
        {"dtype": "bfloat16", "logits_bytes": 4 * VOCABULARY * 7},
    ),
    "states in bfloat16": ("qwen3", None, {"states": "bfloat16"}),
}


def on_host(*given, **settings) -> Operations:
    """Each group has one block."""
    made = make(*given, offload="weights", shard_group_parameters=1, **settings)
    groups = made.trainer.backend._groups._modules()
    assert len(groups) > 1
    for group in groups:
        shards = group._get_fsdp_state()._fsdp_param_group.fsdp_params
        assert shards and all(each.offload_to_cpu for each in shards)
    return made


@pytest.mark.parametrize("way", WAYS)
def test_a_run_has_the_bits_of_one_with_weights_on_the_device(models, tmp_path, way):
    architecture, lora, settings = WAYS[way]
    settings = {"micro_batch_tokens": 24, **settings}
    there = on_host(models[architecture], lora, **settings)
    here = make(models[architecture], lora, **settings)
    for number in range(2):
        for seed in (number, number + 10):
            answers = [forward_backward(each, data_of(seed, 12)) for each in (there, here)]
            assert answers[0] == answers[1]
        assert_same(gradients(there.trainer), gradients(here.trainer))
        assert step(there, clip=0.5) == step(here, clip=0.5)
        assert (logprobs(there, data_of(7)) == logprobs(here, data_of(7))).all()
    assert_same(weights(there), weights(here))
    published = []
    for name, each in (("there", there), ("here", here)):
        publish(each, tmp_path / name)
        (file,) = (tmp_path / name).glob("*.safetensors")
        published.append(load_file(file))
    assert_same(*published)


@pytest.mark.parametrize("lora", [None, SPEC], ids=["full", "lora"])
def test_checkpoints_are_those_of_any_other_run(model, tmp_path, lora):
    """Either kind of run can continue the other's checkpoint."""
    made = {"there": on_host, "here": make}
    for name, other in (("there", "here"), ("here", "there")):
        saved = made[name](model, lora)
        train(saved, 2)
        save(saved, tmp_path / name)
        restored = made[other](model, lora)
        assert not load(restored, tmp_path / name).HasField("failure")
        for each in (saved, restored):
            train(each, 2, seed=2)
        assert_same(weights(restored), weights(saved))


def test_a_snapshot_is_a_copy_and_restores_the_run(model, tmp_path):
    alone = on_host(model, None)
    train(alone, 2)
    path = str(tmp_path / "s")
    alone.take_snapshot(trainer_pb2.TakeSnapshotRequest(path=path))
    train(alone, 2, seed=2)
    assert not alone.snapshots.result(path).result(timeout=60).HasField("failure")
    restored = on_host(model, None)
    assert not restored.restore(trainer_pb2.RestoreRequest(path=path)).HasField("failure")
    train(restored, 2, seed=2)
    assert_same(weights(restored), weights(alone))


def test_runs_that_share_a_model_have_it_in_one_place(model):
    there = on_host(model, SPEC).trainer.backend
    other = there.share(TrainingSpec(lora=SPEC, offload="weights"))
    assert other._model is there._model
    with pytest.raises(
        InvalidRequest, match="offload 'none', and this trainer's model has 'weights'"
    ):
        there.share(TrainingSpec(lora=SPEC))
