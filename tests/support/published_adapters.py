"""Published adapters of a model with one matrix, for a fake engine."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from sampler_service.weights.loader import LoadableVersion
from tandem.weights import Canary, Manifest, checksum_file

RANK = 4
LAYER = "model.layers.0.self_attn.q_proj"


def write_base(path: Path) -> Path:
    """Write a model with one matrix [6, 5] and tied embeddings [9, 5]."""
    path.mkdir()
    tensors = {f"{LAYER}.weight": (6, 5), "model.embed_tokens.weight": (9, 5)}
    save_file({k: np.zeros(v, np.float32) for k, v in tensors.items()}, path / "a.safetensors")
    return path


def pair(layer: str, *, rank: int = RANK, outputs: int = 6, inputs: int = 5):
    name = f"base_model.model.{layer}"
    return {
        f"{name}.lora_A.weight": np.zeros((rank, inputs), np.float32),
        f"{name}.lora_B.weight": np.zeros((outputs, rank), np.float32),
    }


def adapter(
    path: Path, number: int, *, tensors=None, canary: bool = True, **config
) -> LoadableVersion:
    """Publish an adapter with zeros as canary logprobs, as the fake computes them."""
    name = f"run/v{number}"
    directory = path / f"v{number}"
    directory.mkdir()
    save_file(pair(LAYER) if tensors is None else tensors, directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text(
        json.dumps({"r": RANK, "lora_alpha": 32, "target_modules": ["q_proj"], **config})
    )
    manifest = Manifest(
        version=name,
        run_id="run",
        step=number,
        adapter=True,
        dtype="float32",
        tensors=2,
        created="2026-01-01T00:00:00Z",
        files=[checksum_file(file) for file in sorted(directory.iterdir())],
        canary=Canary(tokens=[1, 2, 3], logprobs=[0.0, 0.0]) if canary else None,
    )
    (directory / "manifest.json").write_text(manifest.model_dump_json())
    return LoadableVersion(name=name, path=directory, adapter=True)
