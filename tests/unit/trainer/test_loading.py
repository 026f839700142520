"""A model is built without memory, prepared, and filled tensor by tensor."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import fully_shard
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    Gemma3Config,
    Gemma3TextConfig,
    LlamaConfig,
    MambaConfig,
    Qwen3NextConfig,
    T5Config,
)

from tandem.errors import WorkerStartFailed
from tests.support.local_trainer import make, plain
from tests.support.tiny_model import ARCHITECTURES, write_tiny_model
from trainer_service.models.huggingface import load_model, small_model
from trainer_service.models.logprobs import comes_apart
from trainer_service.models.packing import why_not_packed


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


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_small_model_can_do_what_the_whole_one_can(models, architecture):
    whole, small = load_model(models[architecture]), small_model(models[architecture])
    assert small is not None and type(small) is type(whole)
    assert why_not_packed(small) == why_not_packed(whole)
    assert comes_apart(small) == comes_apart(whole)


def test_a_small_model_of_many_layers_has_each_kind_of_them(tmp_path):
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    config = Gemma3TextConfig(
        vocab_size=99,
        hidden_size=96,
        intermediate_size=77,
        num_hidden_layers=12,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=16,
        layer_types=kinds * 2,
    )
    config.save_pretrained(tmp_path)
    small = small_model(tmp_path)
    assert small is not None
    assert small.config.layer_types == kinds
    assert (small.config.num_attention_heads, small.config.hidden_size) == (2, 32)


def test_without_a_small_model_there_is_none(tmp_path):
    MambaConfig(vocab_size=99, hidden_size=16, num_hidden_layers=2).save_pretrained(tmp_path)
    assert small_model(tmp_path) is None  # it has no heads


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (
            MambaConfig(hidden_size=32, num_hidden_layers=1),
            r"\(mamba\) cannot be trained: .* keep a state",
        ),
        (Qwen3NextConfig(hidden_size=32, num_hidden_layers=1), "'linear_attention'"),
        (T5Config(), "an encoder"),
        (Gemma3Config(), "vision_config"),
        (LlamaConfig(rope_parameters={"rope_type": "dynamic", "factor": 2.0}), "'dynamic' rotary"),
    ],
    ids=lambda each: getattr(each, "model_type", ""),
)
def test_what_cannot_be_trained_is_refused_before_weights_are_read(tmp_path, config, reason):
    config.save_pretrained(tmp_path)
    with pytest.raises(WorkerStartFailed, match=reason):
        make(tmp_path, None)


def test_a_model_whose_tokens_see_later_ones_is_refused(tmp_path):
    config = BertConfig(
        vocab_size=96, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, is_decoder=True
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        parameter.data.mul_(5.0)
    model.save_pretrained(tmp_path)
    make(tmp_path, None)
    config.is_decoder = False
    config.save_pretrained(tmp_path)
    with pytest.raises(WorkerStartFailed, match=r"BertLMHeadModel cannot be .* depends on later"):
        make(tmp_path, None)
