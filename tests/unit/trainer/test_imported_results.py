"""Results of other frameworks, written by PEFT and transformers, become checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from sampler_service.weights.adapters import check_adapter
from sampler_service.weights.loader import read_inventory
from tandem.errors import CheckpointDamaged
from tandem.weights import open_version
from tandem.weights.imported import Imported, ImportTargets, import_result
from tests.support.local_trainer import (
    data_of,
    load,
    logprobs,
    logprobs_of_model,
    make,
    plain,
    train,
)

DENSE = ("qwen3", "llama", "gpt_neox")


def write_adapter(model: Path, folder: Path, **config) -> torch.nn.Module:
    torch.manual_seed(3)
    chosen = {"r": 4, "lora_alpha": 6.5, "target_modules": "all-linear"} | config
    adapted = get_peft_model(plain(model), LoraConfig(task_type="CAUSAL_LM", **chosen))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    adapted.save_pretrained(folder)
    return adapted.eval()


def write_whole(model: Path, folder: Path, **settings) -> torch.nn.Module:
    torch.manual_seed(4)
    trained = plain(model)
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    trained.save_pretrained(folder, **settings)
    return trained


def imported(source: Path, model: Path, folder: Path) -> tuple[Imported, ImportTargets]:
    targets = ImportTargets(
        run_id="s-1:train:0",
        step=7,
        version="s-1:train:0/v000001-11111111",
        version_path=folder / "weights/s-1_train_0/v000001-11111111",
        state_path=folder / "checkpoints/s-1_train_0/final-11111111",
    )
    return import_result(source, model, "tiny", targets), targets


@pytest.mark.parametrize("architecture", DENSE)
@pytest.mark.parametrize("write", [write_adapter, write_whole])
def test_a_trainer_continues_a_result_and_computes_its_logprobs(
    models, tmp_path, architecture, write
):
    model, data = models[architecture], data_of(9)
    expected = logprobs_of_model(write(model, tmp_path / "result"), data)
    found, targets = imported(tmp_path / "result", model, tmp_path)
    trainer = make(model, found.training.lora)
    assert np.abs(logprobs(trainer, data) - expected).max() > 0.01
    assert load(trainer, targets.state_path).step == 7
    np.testing.assert_allclose(logprobs(trainer, data), expected, atol=1e-5)
    manifest = open_version(targets.version_path, name=targets.version)
    assert manifest.adapter == (write is write_adapter)
    assert (manifest.step, manifest.bytes) == (7, found.version_bytes)
    check_that_an_engine_takes_it(targets.version_path, model, adapter=manifest.adapter)
    train(trainer, 1)
    assert np.abs(logprobs(trainer, data) - expected).max() > 1e-4


def check_that_an_engine_takes_it(version: Path, model: Path, *, adapter: bool) -> None:
    base = read_inventory(model)
    if adapter:
        check_adapter(version, base=base, max_rank=8, name="v1")
    else:
        assert read_inventory(version).keys() == base.keys()
        assert (version / "tokenizer.json").exists()


def test_a_model_in_several_files_is_imported(models, tmp_path):
    write_whole(models["llama"], tmp_path / "result", max_shard_size="20KB")
    files = sorted(file.name for file in (tmp_path / "result").glob("*.safetensors*"))
    assert len(files) > 2
    found, targets = imported(tmp_path / "result", models["llama"], tmp_path)
    assert files == sorted(file.name for file in targets.version_path.glob("*.safetensors*"))
    assert found.training.lora is None


def test_a_repeated_import_changes_nothing(models, tmp_path):
    write_adapter(models["llama"], tmp_path / "result")
    first, targets = imported(tmp_path / "result", models["llama"], tmp_path)
    written = (targets.version_path / "manifest.json").stat()
    assert imported(tmp_path / "result", models["llama"], tmp_path)[0] == first
    after = (targets.version_path / "manifest.json").stat()
    assert (after.st_ino, after.st_mtime_ns) == (written.st_ino, written.st_mtime_ns)


def without_a_tensor(result: Path) -> None:
    file = next(result.glob("*.safetensors"))
    tensors = load_file(file)
    tensors.pop(sorted(tensors)[0])
    save_file(tensors, file)


def of_another_shape(result: Path) -> None:
    file = next(result.glob("*.safetensors"))
    tensors = load_file(file)
    name = sorted(tensors)[0]
    tensors[name] = tensors[name][:-1].clone()
    save_file(tensors, file)


def cut(result: Path) -> None:
    file = next(result.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1])


def with_a_link(result: Path) -> None:
    file = next(result.glob("*.safetensors"))
    file.rename(result.parent / file.name)
    file.symlink_to(result.parent / file.name)


@pytest.mark.parametrize("damage", [without_a_tensor, of_another_shape, cut, with_a_link])
@pytest.mark.parametrize("write", [write_adapter, write_whole])
def test_a_damaged_result_is_refused_and_leaves_nothing(models, tmp_path, write, damage):
    write(models["llama"], tmp_path / "result")
    damage(tmp_path / "result")
    with pytest.raises(CheckpointDamaged, match="the result of the job is damaged"):
        imported(tmp_path / "result", models["llama"], tmp_path)
    assert not [*tmp_path.glob("weights/*"), *tmp_path.glob("checkpoints/*")]


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"target_modules": ["q_proj"]}, "is not on all linear layers of attention"),
        ({"use_rslora": True}, "is not a plain LoRA adapter"),
        ({"rank_pattern": {"q_proj": 2}}, "is not a plain LoRA adapter"),
    ],
)
def test_an_adapter_that_no_trainer_could_continue_is_refused(models, tmp_path, config, why):
    write_adapter(models["llama"], tmp_path / "result", **config)
    with pytest.raises(CheckpointDamaged, match=why):
        imported(tmp_path / "result", models["llama"], tmp_path)


def test_an_adapters_configuration_is_that_of_our_own_adapters(models, tmp_path):
    write_adapter(models["llama"], tmp_path / "result", lora_dropout=0.1)
    _found, targets = imported(tmp_path / "result", models["llama"], tmp_path)
    config = json.loads((targets.version_path / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["lora_dropout"]) == (4, 6.5, 0.0)
