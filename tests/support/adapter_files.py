"""LoRA adapters in PEFT's layout, and the plain weights with an adapter added."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
UNEMBEDDING = ("lm_head",)
EVERYTHING = (*ATTENTION, *MLP, *UNEMBEDDING)
ALPHA = 32


def write_adapter_files(
    path: Path,
    model: Path,
    *,
    seed: int,
    rank: int = 4,
    modules: Sequence[str] = EVERYTHING,
    size: float = 0.02,
) -> Path:
    """Write random A [r, in] and B [out, r] for every linear layer of `model` in `modules`."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, layer in network.named_modules():
        if name.rpartition(".")[2] not in modules:
            continue
        outputs, inputs = layer.weight.shape
        for letter, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
            tensors[f"base_model.model.{name}.lora_{letter}.weight"] = (
                torch.randn(shape, generator=random) * size**0.5 * rank**-0.25
            )
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model),
        "r": rank,
        "lora_alpha": ALPHA,
        "target_modules": list(modules),
        "lora_dropout": 0.0,
        "bias": "none",
    }
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path


def write_merged(path: Path, model: Path, adapter: Path) -> Path:
    """Write the model with alpha / r · B·A added. Its head becomes a separate tensor."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    network.lm_head.weight = torch.nn.Parameter(network.lm_head.weight.detach().clone())
    network.config.tie_word_embeddings = False
    config = json.loads((adapter / "adapter_config.json").read_text())
    tensors = load_file(adapter / "adapter_model.safetensors")
    with torch.no_grad():
        for name, a in tensors.items():
            if ".lora_A." not in name:
                continue
            layer = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            delta = tensors[name.replace("lora_A", "lora_B")] @ a
            network.get_submodule(layer).weight += config["lora_alpha"] / config["r"] * delta
    network.save_pretrained(path)
    return path
