"""Base models small enough for a test: a Qwen3 with tied embeddings, and a Llama without."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.numpy import load_file, save_file

from tandem.demo.tiny_model import TinyShape, write_tiny_model

TIED, LLAMA = "test/tied", "test/llama"
VOCABULARY = 128
MAX_LENGTH = 256


def _shape(*, tied: bool) -> TinyShape:
    return TinyShape(hidden=64, layers=2, ffn=128, heads=2, max_length=MAX_LENGTH, tied=tied)


def write_qwen(path: Path, *, seed: int) -> Path:
    write_tiny_model(path, seed=seed, shape=_shape(tied=True))
    return path


def write_llama(path: Path, *, seed: int) -> Path:
    """Another architecture: no norms on queries and keys, grouped key heads, an untied head."""
    shape = _shape(tied=False)
    write_tiny_model(path, seed=seed, shape=shape)
    config = json.loads((path / "config.json").read_text())
    for key in ("use_sliding_window", "sliding_window"):
        del config[key]
    config |= {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_key_value_heads": 1,
        "mlp_bias": False,
        "bos_token_id": 0,
    }
    (path / "config.json").write_text(json.dumps(config))
    weights = path / "model.safetensors"
    tensors = {}
    for name, tensor in load_file(weights).items():
        if "q_norm" in name or "k_norm" in name:
            continue
        one_head = "k_proj" in name or "v_proj" in name
        tensors[name] = tensor[: shape.head_dim].copy() if one_head else tensor
    save_file(tensors, weights, metadata={"format": "pt"})
    return path
