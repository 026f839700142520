"""The reference: the tiny model in plain transformers and torch, float32 on the CPU."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

Floats = NDArray[np.float32]


def load(path: Path) -> PreTrainedModel:
    """The weights must be exactly the model's."""
    model, info = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not info["missing_keys"], info
    assert not info["unexpected_keys"], info
    return model.eval()


def distributions(model: PreTrainedModel, tokens: Sequence[int]) -> Tensor:
    """Return logprobs [len(tokens), vocabulary]. Row i follows tokens[: i + 1]."""
    return model(torch.tensor([list(tokens)])).logits[0].float().log_softmax(-1)


def target_logprobs(model: PreTrainedModel, tokens: Sequence[int]) -> Tensor:
    """Return the logprobs of tokens[1:], [len(tokens) - 1], with gradients."""
    rows = distributions(model, tokens)[:-1]
    return rows.gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0]


def plain_logprobs(model: PreTrainedModel, tokens: list[list[int]]) -> list[Floats]:
    """Return the logprobs of tokens[1:] of each sequence, [length - 1]."""
    with torch.no_grad():
        return [target_logprobs(model, sequence).numpy() for sequence in tokens]


def trained(
    model: PreTrainedModel,
    tokens: list[list[int]],
    loss: Callable[[list[Tensor]], Tensor],
    *,
    steps: int,
    clip: float = 0.0,
    **adam: object,
) -> PreTrainedModel:
    """Return a copy after some steps of torch's AdamW on the loss of the target logprobs."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), **adam)
    for _ in range(steps):
        optimizer.zero_grad()
        loss([target_logprobs(model, sequence) for sequence in tokens]).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return model


def with_adapter(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """Add the adapter in `folder`, in peft's layout, to a model.

    `base_model.model.NAME.lora_A.weight` [r, in] and `...lora_B.weight` [out, r] add alpha / r *
    B·A to the output of the linear layer NAME. So tied weights stay separate."""
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    scale = config["lora_alpha"] / config["r"]
    layers = {name.rpartition(".lora_")[0] for name in tensors}
    for layer in layers:
        a, b = (tensors[f"{layer}.lora_{which}.weight"] for which in "AB")

        def add(
            _module: torch.nn.Module,
            inputs: tuple[Tensor, ...],
            output: Tensor,
            a: Tensor = a,
            b: Tensor = b,
        ) -> Tensor:
            return output + scale * (inputs[0] @ a.T @ b.T)

        model.get_submodule(layer.removeprefix("base_model.model.")).register_forward_hook(add)
    assert layers, "the adapter has no layers"
    return model
