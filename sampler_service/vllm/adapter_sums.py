"""Compares an adapter in its computing slot with its files, bit by bit.

vLLM keeps an adapter on the host, with B multiplied by alpha / rank, and copies it into a slot. The
slot must hold the numbers of the files (`tandem/weights/sums.py`). The canary alone would accept a
missing adapter, because its bfloat16 tolerance exceeds many adapters' effect."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open

from tandem.weights.model_config import read_json
from tandem.weights.sums import sum_of, sums_of_workers

if TYPE_CHECKING:
    from vllm.lora.model_manager import LoRAModelManager

_EXPERTS = ".experts"
"""Expert layers are stacked and partly repeated, so only the canary checks them."""


@dataclass(frozen=True)
class AdapterSums:
    """An adapter's sums: `held` by a worker, by layer and part, and `wanted` by its files in
    total."""

    held: dict[str, int]
    wanted: int


def adapter_sums(manager: LoRAModelManager, number: int, directory: Path) -> AdapterSums:
    dtype = manager.lora_config.lora_dtype
    config = read_json(directory / "adapter_config.json")
    rank, alpha = float(str(config["r"])), float(str(config["lora_alpha"]))
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    slot = manager.lora_index_to_id.index(number)
    return AdapterSums(
        held={
            name: sum_of(tensor, dtype) for name, tensor in _in_slot(manager, slot, rank=int(rank))
        },
        wanted=sum(sum_of(tensor, dtype) for tensor in _of_files(directory, scale, dtype)),
    )


def adapters_differ(workers: Sequence[AdapterSums]) -> bool:
    """Return whether the workers hold other numbers than the files."""
    held = sums_of_workers([worker.held for worker in workers])
    return (sum(held.values()) - workers[0].wanted) % 2**64 != 0


def _of_files(directory: Path, scale: float, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    for file in directory.glob("*.safetensors"):
        with safe_open(file, framework="pt", device="cpu") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a dict)
                if _EXPERTS not in name:
                    value = tensors.get_tensor(name).to(dtype)
                    yield value if scale == 1 or ".lora_A." in name else value * scale


def _in_slot(
    manager: LoRAModelManager, slot: int, *, rank: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the named A [.., largest rank, in] and B [.., out, rank] of each part of a layer, such
    as q.

    A is zero beyond its rank, so B has no effect there."""
    for name, layer in manager.modules.items():
        if _EXPERTS in name:
            continue
        for number, a in enumerate(_parts(layer.lora_a_stacked)):
            yield f"{name}.A{number}", a[slot]
        for number, b in enumerate(_parts(layer.lora_b_stacked)):
            yield f"{name}.B{number}", b[slot][..., :rank]


def _parts(stack: torch.Tensor | tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return (stack,) if isinstance(stack, torch.Tensor) else stack
