"""LoRA runs on one and two ranks, and the program that merges."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file

from tandem.protocol.worker import LoraSpec, TrainingSpec
from tests.support.local_trainer import (
    SPEC,
    data_of,
    load,
    logprobs,
    logprobs_of_model,
    make,
    plain,
    publish,
    save,
    train,
)
from tests.support.trainer_worker import logprobs_of, request, trainer_process
from trainer_service.lora import merge


def test_adapters_are_float32_where_the_model_computes_in_bfloat16(models, tmp_path):
    with trainer_process(
        models["qwen3"], tmp_path, training=TrainingSpec(lora=SPEC), dtype="bfloat16"
    ) as client:
        facts = client.describe()
        losses = []
        for _ in range(10):
            losses.append(client.output(request(data_of())).metrics["loss:sum"])
            assert not client.optim_step(lr=1e-2).HasField("failure")
        reply, path = client.publish(tmp_path)
    assert facts.dtype == "bfloat16"
    assert losses[-1] < 0.8 * losses[0]
    assert not reply.HasField("failure"), reply.failure
    tensors = load_file(path / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    assert any((t != t.bfloat16().float()).any() for t in tensors.values())


@pytest.mark.parametrize("group", [1, 16_000_000])
def test_two_ranks_begin_train_and_publish_as_one_does(models, tmp_path, group):
    one = make(models["qwen3"])
    publish(one, tmp_path / "one")
    losses = []
    with trainer_process(
        models["qwen3"],
        tmp_path,
        training=TrainingSpec(lora=SPEC),
        ranks=2,
        shard_group_parameters=group,
    ) as two:
        _, new = two.publish(tmp_path)
        for seed in range(3):
            losses.append(two.output(request(data_of(seed))).metrics["loss:sum"])
            assert not two.optim_step(lr=1e-2).HasField("failure")
        score = two.output(request(data_of(9), forward_only=True))
        reply, adapter = two.publish(tmp_path, 2)
        assert not reply.HasField("failure"), reply.failure
    mine, theirs = (load_file(p / "adapter_model.safetensors") for p in (tmp_path / "one", new))
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in mine.items())
    data = data_of(9)
    found = np.concatenate([part.reshape(-1) for part in logprobs_of(score)])
    by_peft = PeftModel.from_pretrained(plain(models["qwen3"]), adapter)
    np.testing.assert_allclose(logprobs_of_model(by_peft, data), found, atol=1e-5)
    assert train(one, 3) == pytest.approx(losses, rel=1e-3)
    np.testing.assert_allclose(logprobs(one, data), found, atol=2e-2)


def test_a_rank_too_large_ends_the_start_with_its_own_error(models, tmp_path):
    spec = TrainingSpec(lora=LoraSpec(rank=64))
    with trainer_process(models["qwen3"], tmp_path, training=spec, ranks=2, wait=False) as client:
        report = client.next_report()
    assert report.error_type == "unsuitable_lora"
    assert "rank 64 is too large" in report.error


def test_an_adapter_checkpoint_of_two_ranks_loads_into_one_and_back(models, tmp_path):
    one = make(models["qwen3"])
    data = data_of(9)

    def score(client) -> np.ndarray:
        output = client.output(request(data, forward_only=True))
        return np.concatenate([part.reshape(-1) for part in logprobs_of(output)])

    with trainer_process(
        models["qwen3"],
        tmp_path,
        training=TrainingSpec(lora=SPEC),
        ranks=2,
        shard_group_parameters=1,
    ) as two:
        for seed in range(2):
            two.output(request(data_of(seed)))
            two.optim_step(lr=1e-2)
        assert two.save(tmp_path / "a").step == 2
        assert load(one, tmp_path / "a").step == 2
        np.testing.assert_allclose(logprobs(one, data), score(two), atol=1e-4)
        train(one, 1)
        save(one, tmp_path / "b")
        assert two.load(tmp_path / "b", optimizer=True).step == 3
        np.testing.assert_allclose(logprobs(one, data), score(two), atol=1e-4)


def test_the_command_merges_and_says_what_it_made(models, tmp_path, monkeypatch, capsys):
    trainer = make(models["llama"])
    train(trainer, 1)
    publish(trainer, tmp_path / "adapter")
    arguments = [str(tmp_path / "adapter"), str(models["llama"]), str(tmp_path / "out")]
    command = [sys.executable, "-m", "trainer_service.lora.merge", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["path"] == str(tmp_path / "out")
    monkeypatch.setattr(sys, "argv", ["merge", *arguments])
    with pytest.raises(SystemExit, match="1"):
        merge.main()
    assert capsys.readouterr().err.strip() == "out exists already; name a directory that does not"
