"""Holds an adapter in the slot that batches compute with against its files, to the last bit.

vLLM keeps an adapter on the host, its B multiplied by alpha / rank, and copies it from there into a
slot. This must hold the numbers of the files, wherever they lie in it (`tandem/weights/sums.py`).
An adapter's canary alone would pass one that was not added: in bfloat16 its tolerance is wider than
what many adapters change.
"""

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
"""Adapters of experts are stacked, and partly repeated: their canary has to do."""


@dataclass(frozen=True)
class AdapterSums:
    """What a worker `holds` of an adapter, by layer and part, and what all of it is in the
    files."""

    held: dict[str, int]
    wanted: int


def adapter_sums(manager: LoRAModelManager, number: int, directory: Path) -> AdapterSums:
    """Return the sums of an adapter that was just added."""
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
    """Return whether the workers of an engine hold another adapter than that of the files."""
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
    """Yield A [.., largest rank, in] and B [.., out, rank] of each layer, and of each part of one
    (q, k, v), with a name. Beyond its rank, A is zeros, and so it does not matter what B is
    there."""
    for name, layer in manager.modules.items():
        if _EXPERTS in name:
            continue
        for number, a in enumerate(_parts(layer.lora_a_stacked)):
            yield f"{name}.A{number}", a[slot]
        for number, b in enumerate(_parts(layer.lora_b_stacked)):
            yield f"{name}.B{number}", b[slot][..., :rank]


def _parts(stack: torch.Tensor | tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return (stack,) if isinstance(stack, torch.Tensor) else stack
