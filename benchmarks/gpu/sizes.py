"""The models of the benchmark: their shapes, random weights and batches, and the work of a step."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tandem.demo.tiny_model import TinyShape, tensor_shapes, write_layout

SIZES = {
    "0.5B": TinyShape(
        hidden=896, layers=24, ffn=4864, heads=14, head_dim=64, vocabulary=151_936, max_length=4096
    ),
    "1.5B": TinyShape(
        hidden=1536,
        layers=28,
        ffn=8960,
        heads=12,
        head_dim=128,
        vocabulary=151_936,
        max_length=4096,
    ),
    "4B": TinyShape(
        hidden=2560,
        layers=36,
        ffn=9728,
        heads=32,
        kv_heads=8,
        head_dim=128,
        vocabulary=151_936,
        max_length=16_384,
    ),
    "8B": TinyShape(
        hidden=4096,
        layers=32,
        ffn=12288,
        heads=32,
        head_dim=128,
        vocabulary=151_936,
        max_length=4096,
    ),
    "tiny": TinyShape(),
}
"""Shapes with about the parameters of the named models. "4B" is the shape of Qwen3-4B."""
_LARGE_FROM = 4e9
"""Parameters."""
PEAK = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "B200": 2250e12, "L40S": 362e12}
"""Dense bfloat16 FLOP/s of NVIDIA's data sheets, by a part of the device's name."""

Int64Array = NDArray[np.int64]


def write_model(path: Path, size: str, device: str) -> None:
    """Write a model of random weights in bfloat16, drawn on the device."""
    import torch
    from safetensors.torch import save_file

    shape = SIZES[size]
    write_layout(path, shape)
    weights = {
        name: torch.ones(sizes, dtype=torch.bfloat16)
        if len(sizes) == 1
        else torch.empty(sizes, device=device).normal_(std=0.02).bfloat16().cpu()
        for name, sizes in tensor_shapes(shape).items()
    }
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})


def parameters_of(size: str) -> int:
    return sum(math.prod(sizes) for sizes in tensor_shapes(SIZES[size]).values())


def is_large(size: str) -> bool:
    """True if one device has no room for all parameters with states in float32."""
    return parameters_of(size) > _LARGE_FROM


def sequences_of(size: str, *, count: int, length: int) -> list[Int64Array]:
    """Return `count` random sequences of token ids [length + 1], within the model's limits."""
    shape = SIZES[size]
    length = min(length, shape.max_length)
    drawn = np.random.default_rng(0).integers(3, shape.vocabulary, (count, length + 1))
    return list(drawn)


def flops(size: str, *, tokens: int, length: int, adapters: bool) -> float:
    """Return the floating point operations of a step.

    Each parameter takes 2 forward, 2 for the gradient of the input and, unless frozen, 2 for its
    own gradient. Attention takes half of PaLM's count (arXiv 2204.02311, appendix B), because a
    token sees only earlier tokens. Recomputation, such as checkpointed blocks, counts once."""
    shape = SIZES[size]
    attention = 6 * shape.layers * shape.heads * shape.head_dim * length
    return float(tokens) * ((4 if adapters else 6) * parameters_of(size) + attention)
