"""`tandem checkpoints`, and `tinker checkpoint` beyond the conformance suite."""

from __future__ import annotations

import json

import pytest

from tandem.errors import InvalidField, InvalidRequest, NameTaken, UnknownWeights
from tandem.weights.serving import ServedCheckpoint, inference_service, vllm_script
from tests.support.gateway.checkpoints import listed, place, step
from tests.support.gateway.running import KEY
from tests.support.sdk import run_tinker
from tests.support.waiting import wait_until


@pytest.fixture
def tandem_command(tandem):
    return lambda *arguments: json.loads(tandem("checkpoints", *arguments, "--json"))


def test_tinker_deletes_by_run_type_and_date(gate, training, rest):
    training.save_state("state").result()
    sampled = training.save_weights_for_sampler("sampled").result().path
    chosen = ("--run-id", training.model_id, "--type", "weights", "--after", "2020-01-01")
    run_tinker(gate.url, KEY, "checkpoint", "delete", "-y", *chosen)
    assert set(listed(rest, training.model_id)) == {sampled}


def test_tandem_lists_and_deletes_checkpoints(gate, training, tandem_command):
    first = training.save_state("first").result().path
    second = training.save_weights_external("second").result().path
    listed = tandem_command("list", "--run", training.model_id)["checkpoints"]
    assert [c["tinker_path"] for c in listed] == [second, first]
    assert tandem_command("list", "--limit", "1")["checkpoints"][0]["tinker_path"] == second
    assert tandem_command("delete", first, "--yes") == {"deleted": [first]}
    with pytest.raises(UnknownWeights, match="there is no checkpoint"):
        tandem_command("delete", first, "--yes")
    with pytest.raises(InvalidRequest, match="tinker://"):
        tandem_command("delete", "first", "--yes")
    wait_until(lambda: place(gate, training.model_id) == [])


def test_tandem_exports_checkpoints_of_every_kind(training, tandem_command, tmp_path):
    step(training)
    saves = {
        training.save_state("a").result().path: {"rank-0-0.safetensors", "checkpoint.json"},
        training.save_weights_for_sampler("a").result().path: {"model.safetensors", "config.json"},
        training.save_weights_external("a").result().path: {"model.safetensors", "config.json"},
    }
    for number, (path, names) in enumerate(saves.items()):
        target = tmp_path / str(number)
        answer = tandem_command("export", path, str(target))
        assert {file.name for file in target.iterdir()} == names
        assert answer["bytes"] == sum(file.stat().st_size for file in target.iterdir())
        with pytest.raises(NameTaken):
            tandem_command("export", path, str(target))
    assert (tmp_path / "1" / "model.safetensors").read_bytes() == b"weights of step 1"


def test_tandem_merges_adapters_alone(training, tandem_command, tmp_path):
    path = training.save_weights_for_sampler("whole").result().path
    with pytest.raises(InvalidRequest, match="no LoRA adapter"):
        tandem_command("export", path, str(tmp_path / "out"), "--merged")
    assert list(tmp_path.iterdir()) == []


def test_tandem_prints_how_to_serve_whole_models_and_adapters(
    training, service, tandem, tandem_command
):
    whole = training.save_weights_for_sampler("whole").result().path
    assert tandem("checkpoints", "serve", whole) == vllm_script(ServedCheckpoint(whole))
    run = service.create_lora_training_client("tiny", rank=8, train_unembed=False).result()
    path = run.save_weights_for_sampler("adapter").result().path
    base = next(m["path"] for m in json.loads(tandem("models", "list", "--json"))["models"])
    assert tandem("checkpoints", "serve", path, "--dtype", "float32") == vllm_script(
        ServedCheckpoint(path, rank=8, base=base, dtype="float32")
    )
    kserve = ("serve", path, "--as", "kserve", "--storage", "s3://bucket/adapter", "--gpus", "2")
    with pytest.raises(InvalidField, match="base is"):
        tandem_command(*kserve)
    at_hub = ServedCheckpoint(path, rank=8, base="hf://org/tiny:main")
    expected = inference_service(at_hub, storage="s3://bucket/adapter", gpus=2)
    assert tandem_command(*kserve, "--base", "hf://org/tiny:main") == expected
    assert "--merged" in tandem("checkpoints", "serve", path, "--merged")
    with pytest.raises(InvalidField, match="no LoRA adapter"):
        tandem("checkpoints", "serve", whole, "--merged")
