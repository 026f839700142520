"""Holds an adapter in the slot that batches compute with against its files, to the last bit.

vLLM keeps an adapter on the host, its B multiplied by alpha / rank, and copies it from there into a
slot. This must hold the numbers of the files, wherever they lie in it (`weights/sums.py`). An
adapter's canary alone would pass one that was not added: in bfloat16 its tolerance is wider than
what many adapters change.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open

from sampler_service.weights.sums import sum_of
from tandem.model_config import read_json

if TYPE_CHECKING:
    from vllm.lora.model_manager import LoRAModelManager

_EXPERTS = ".experts"
"""Adapters of experts are stacked, and partly repeated: their canary has to do."""


def adapter_differs(manager: LoRAModelManager, number: int, directory: Path) -> bool:
    """Return whether an adapter that was just added is another than its files."""
    dtype = manager.lora_config.lora_dtype
    config = read_json(directory / "adapter_config.json")
    rank, alpha = float(str(config["r"])), float(str(config["lora_alpha"]))
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    wanted = _sum(_of_files(directory, scale, dtype), dtype)
    slot = manager.lora_index_to_id.index(number)
    return _sum(_in_slot(manager, slot, rank=int(rank)), dtype) != wanted


def _sum(tensors: Iterable[torch.Tensor], dtype: torch.dtype) -> int:
    return sum(sum_of(tensor, dtype) for tensor in tensors) % 2**64


def _of_files(directory: Path, scale: float, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    for file in directory.glob("*.safetensors"):
        with safe_open(file, framework="pt", device="cpu") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a dict)
                if _EXPERTS not in name:
                    value = tensors.get_tensor(name).to(dtype)
                    yield value if scale == 1 or ".lora_A." in name else value * scale


def _in_slot(manager: LoRAModelManager, slot: int, *, rank: int) -> Iterator[torch.Tensor]:
    """Yield A [.., largest rank, in] and B [.., out, rank] of each layer, and of each part of one
    (q, k, v). Beyond its rank, A is zeros, and so it does not matter what B is there."""
    for name, layer in manager.modules.items():
        if _EXPERTS not in name:
            yield from (each[slot] for each in _parts(layer.lora_a_stacked))
            yield from (each[slot][..., :rank] for each in _parts(layer.lora_b_stacked))


def _parts(stack: torch.Tensor | tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return (stack,) if isinstance(stack, torch.Tensor) else stack
