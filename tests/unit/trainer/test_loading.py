"""A model is built without memory, prepared, and filled tensor by tensor."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from tandem.errors import WorkerStartFailed
from tests.support.local_trainer import plain
from tests.support.tiny_model import ARCHITECTURES, write_tiny_model
from trainer_service.models.huggingface import load_model


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_loaded_model_is_that_of_its_files(models, architecture):
    found, wanted = load_model(models[architecture]), plain(models[architecture])

    assert not found.training
    for kind in ("named_parameters", "named_buffers"):
        tensors = dict(getattr(wanted, kind)())
        assert dict(getattr(found, kind)()).keys() == tensors.keys()
        for name, tensor in getattr(found, kind)():
            assert torch.equal(tensor, tensors[name]), name


def test_parameters_have_no_memory_when_they_are_prepared_and_their_type_afterwards(models):
    def prepare(model):
        for parameter in model.parameters():
            assert parameter.is_meta
            parameter.data = parameter.data.bfloat16()

    found, wanted = load_model(models["qwen3"], prepare=prepare), plain(models["qwen3"])

    for name, parameter in wanted.named_parameters():
        assert torch.equal(found.get_parameter(name), parameter.bfloat16()), name
    for name, buffer in found.named_buffers():  # rotary tables stay exact
        assert buffer.dtype == torch.float32, name


@pytest.fixture
def changed(tmp_path):
    """Writes a model, changes its tensors, and returns its directory."""

    def change(change_tensors, *, architecture="llama"):
        path = write_tiny_model(tmp_path / "model", architecture=architecture)
        tensors = load_file(path / "model.safetensors")
        change_tensors(tensors)
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        return path

    return change


def test_a_missing_tensor_is_named_and_not_drawn_at_random(changed):
    path = changed(lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(WorkerStartFailed, match=r"1 missing keys, such as model.layers.1.mlp.up"):
        load_model(path)


def test_a_tensor_of_another_shape_is_named(changed):
    path = changed(lambda tensors: tensors.update({"lm_head.weight": torch.zeros(3, 32)}))
    with pytest.raises(WorkerStartFailed, match=r"1 mismatched keys, such as .*lm_head.weight"):
        load_model(path)


def test_weights_that_are_said_to_be_tied_and_differ_are_refused(changed):
    path = changed(lambda tensors: None)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    with pytest.raises(WorkerStartFailed, match="set tie_word_embeddings to false"):
        load_model(path)


@pytest.fixture
def second() -> Iterator[None]:
    """The second rank of two, which has nobody to talk to. (Torch remembers for all of a process
    which rank it is, so that this cannot be each in turn.)"""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_rank_reads_its_shards_into_memory_of_its_own(models, architecture, second):
    found = load_model(models[architecture], prepare=fully_shard)
    wanted = plain(models[architecture])

    assert dict(found.named_parameters()).keys() == dict(wanted.named_parameters()).keys()
    for name, parameter in found.named_parameters():
        part = parameter.to_local()
        assert torch.equal(part, wanted.get_parameter(name).chunk(2)[1]), name
        assert part.untyped_storage().nbytes() == part.nbytes, name
        copied = copy.deepcopy(parameter.detach())  # as snapshots do
        assert torch.equal(copied.to_local(), part), name
    head, embedding = found.get_output_embeddings(), found.get_input_embeddings()
    tied = wanted.get_output_embeddings().weight is wanted.get_input_embeddings().weight
    assert (head.weight is embedding.weight) == tied
