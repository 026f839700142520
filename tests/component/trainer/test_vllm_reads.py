"""vLLM's loader reads a trainer's files, without an engine."""

from __future__ import annotations

import pytest
import torch

from tests.support.local_trainer import make, publish, train, weights

pytest.importorskip("vllm")


def test_vllms_loader_takes_every_tensor_of_an_adapter(models, tmp_path):
    from vllm.config.lora import LoRAConfig
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    trainer = make(models["qwen3"])
    train(trainer, 1)
    publish(trainer, tmp_path / "v1")
    helper = PEFTHelper.from_local_dir(str(tmp_path / "v1"), max_position_embeddings=64)
    helper.validate_legal(LoRAConfig(max_lora_rank=8))
    assert helper.vllm_lora_scaling_factor == 8.0
    expected = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    loaded = LoRAModel.from_local_checkpoint(
        str(tmp_path / "v1"), {*expected, "lm_head"}, helper, device="cpu", model_vocab_size=96
    )
    here = {n.rpartition(".")[0] for n in weights(trainer) if ".lora_" in n}
    assert set(loaded.loras) == here
    head = loaded.loras["lm_head"]
    assert torch.equal(head.lora_b, weights(trainer)["lm_head.lora_B"])
