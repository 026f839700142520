"""Checkpoints of LoRA runs: continued runs, and misfits."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import tinker
from typer.testing import CliRunner

from gateway.checkpoints.compatibility import check_compatible, training_from
from tandem.cli import checkpoints
from tandem.cli.main import app
from tandem.errors import CheckpointMismatch
from tandem.protocol.worker import LoraSpec, TrainingSpec
from tests.support.gateway.checkpoints import error_of, step
from tests.support.model_files import tensor_file
from tests.support.sdk import load_state

PATH = "tinker://s-1:train:0/weights/a"
FULL = TrainingSpec()
LORA = TrainingSpec(lora=LoraSpec(rank=8, seed=1, unembedding=False))


@pytest.fixture
def lora(service):
    return service.create_lora_training_client("tiny", rank=8, train_unembed=False).result()


@pytest.fixture
def full(service):
    return service.create_lora_training_client("tiny:full").result()


def test_a_run_made_from_an_adapters_state_trains_such_an_adapter(gate, service, lora, rest):
    step(lora, 2)
    path = lora.save_state("middle").result().path
    copy = rest.copy_weights(path, "archive").result()
    for source in (path, copy):
        info = rest.get_weights_info_by_tinker_path(source).result()
        assert (info.base_model, info.is_lora, info.lora_rank) == ("tiny", True, 8)
        assert (info.train_attn, info.train_mlp, info.train_unembed) == (True, True, False)
        resumed = service.create_training_client_from_state_with_optimizer(source).result()
        run = gate.trainer_of(resumed.model_id).runs[resumed.model_id]
        assert run.step == 2
        assert run.training.lora.rank == 8
        assert run.training.lora.unembedding is False
        assert resumed.get_info().lora_rank == 8
        again = resumed.save_state("again").result().path
        assert rest.get_weights_info_by_tinker_path(again).result().lora_rank == 8


def test_an_adapters_state_and_all_parameters_do_not_mix(service, lora, full):
    adapter = lora.save_state("adapter").result().path
    whole = full.save_state("whole").result().path
    assert "holds a LoRA adapter of rank 8 on attention and mlp" in error_of(
        load_state(full, adapter)
    )
    assert "holds all parameters" in error_of(load_state(lora, whole))
    other = service.create_lora_training_client("tiny", rank=4).result()
    assert "trains one of rank 4 on attention, mlp and unembedding" in error_of(
        load_state(other, adapter)
    )
    with pytest.raises(tinker.BadRequestError, match="holds a LoRA adapter"):
        service.create_training_client_from_state(adapter, base_model="tiny:full").result()
    load_state(lora, adapter).result()
    load_state(full, whole).result()


def test_an_exported_adapter_is_peft_files_alone(lora, rest):
    path = lora.save_weights_external("adapter").result().path
    urls = rest.get_external_weights_urls(path).result().urls
    assert set(urls) == {"adapter_config.json", "adapter_model.safetensors"}


def test_an_optimizers_state_is_loaded_into_the_same_optimizer_alone():
    dimuon = TrainingSpec(optimizer="dimuon")
    with pytest.raises(CheckpointMismatch, match="the optimizer adamw, and this run uses dimuon"):
        check_compatible(path=PATH, saved=FULL, here=dimuon, optimizer=True)
    check_compatible(path=PATH, saved=FULL, here=dimuon, optimizer=False)
    check_compatible(path=PATH, saved=dimuon, here=dimuon, optimizer=True)


def test_an_adapters_seed_does_not_matter_once_it_has_weights():
    other = TrainingSpec(lora=LORA.lora.model_copy(update={"seed": 2}))
    check_compatible(path=PATH, saved=LORA, here=other, optimizer=True)


@pytest.mark.parametrize("saved", [FULL, LORA])
def test_what_a_new_run_trains_comes_from_the_checkpoint(saved):
    def made(**changes):
        settings = {"full": False, "optimizer": False, "asked": None} | changes
        return training_from(path=PATH, saved=saved, **settings)

    assert made() == saved
    assert made(asked="dimuon") == TrainingSpec(lora=saved.lora, optimizer="dimuon")
    assert made(optimizer=True, asked="adamw") == saved
    with pytest.raises(CheckpointMismatch, match="dimuon was asked"):
        made(optimizer=True, asked="dimuon")
    muon = saved.model_copy(update={"optimizer": "dimuon"})
    with_state = training_from(path=PATH, saved=muon, full=False, optimizer=True, asked=None)
    assert with_state == muon
    without = training_from(path=PATH, saved=muon, full=False, optimizer=False, asked=None)
    assert without.optimizer == "adamw", "the SDK's default for weights alone"


def test_tandem_merges_an_adapter_into_the_registered_base(gate, lora, tmp_path, monkeypatch):
    path = lora.save_weights_for_sampler("adapter").result().path
    commands = []

    def merge(command, **_settings):
        commands.append(command)
        assert (Path(command[3]) / "adapter_config.json").is_file()
        Path(command[5]).mkdir()
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr("tandem.cli.checkpoints.subprocess.run", merge)
    target = tmp_path / "merged"
    arguments = ["checkpoints", "export", path, str(target), "--merged", "--json"]
    result = CliRunner().invoke(app, [*arguments, "--data-dir", str(gate.settings.data_dir)])
    assert json.loads(result.stdout)["merged"] is True
    (command,) = commands
    assert command[1:3] == ["-m", "trainer_service.lora.merge"]
    assert command[4:] == [gate.gateway.models.get("tiny").path, str(target)]
    assert [child.name for child in tmp_path.iterdir()] == ["merged"], "no partial is left"


def test_an_exported_adapter_names_the_folder_of_its_base_model(gate, lora, tmp_path):
    folder = Path(gate.gateway.models.get("tiny").path)
    path = lora.save_weights_for_sampler("adapter").result().path

    def exported(name: str, *more: str) -> tuple[dict[str, object], str]:
        arguments = ["checkpoints", "export", path, str(tmp_path / name), *more]
        done = CliRunner().invoke(app, [*arguments, "--data-dir", str(gate.settings.data_dir)])
        assert done.exit_code == 0, done.output
        return json.loads((tmp_path / name / "adapter_config.json").read_text()), done.output

    config, said = exported("registered")
    assert config == {
        "fake": True,
        "base_model_name_or_path": str(folder),
        "revision": None,
    }
    assert "Note" not in said
    mine = shutil.copytree(folder, tmp_path / "mine")
    assert exported("chosen", "--base", str(mine))[0]["base_model_name_or_path"] == str(mine)


def test_an_export_says_which_programs_cannot_merge_the_adapter_of_a_tied_head(tmp_path):
    config = tmp_path / "adapter_config.json"
    for heads, tensors, noted in (
        (["lm_head"], ["model.embed_tokens.weight"], True),
        (["model.layers.0.mlp.up_proj", "lm_head"], ["wte.weight"], True),
        (["lm_head"], ["model.embed_tokens.weight", "lm_head.weight"], False),
        (["q_proj"], ["model.embed_tokens.weight"], False),
    ):
        config.write_text(json.dumps({"target_modules": heads}))
        (tmp_path / "model.safetensors").write_bytes(tensor_file(*tensors, size=512))
        assert ("export it with --merged" in checkpoints._name_base(config, tmp_path)) is noted
