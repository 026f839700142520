"""Sums by which an engine proves that it holds a version's weights, to the last bit.

An engine keeps the tensors of a file in other tensors: q, k and v are one, experts lie in a stack,
vocabularies are padded, embeddings are the output head as well. What stays is which numbers there
are. So each is hashed, and the hashes are added up, by the blocks of the model: a sum that does not
depend on where a number lies, and to which padding with zeros adds nothing.

What is hashed are the eight bytes of 4 (bfloat16) or 2 (float32) numbers beside each other in a
row; in a vector, in rows that are no multiple of that, and in experts, which a CPU's kernels keep
in another order, each number. Beforehand, all are brought into the engine's type, as the engine
does with what it loads. Zeros have the hash 0. That other numbers have the same sum has a
probability of some 2^-32: this is against mistakes, not against forgery.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

WeightSums = dict[str, int]
"""By block: the first number in the names of its parameters, "" for those without."""

_MASK = 2**64 - 1
_FACTOR = 0x9E3779B97F4A7C15 - 2**64
"""The golden ratio as an odd 64-bit number (Knuth's multiplicative hashing), signed."""
_VALUES_ON_CPU = 2**15
"""How many are hashed at once there: as many as torch computes in one thread. Several would wait
for each other at every step, and on busy cores spend most of their time with it."""
_WORDS_ON_GPU = 2**21
"""How many are hashed at once: 48 MiB of a GPU's memory."""
_BLOCK = re.compile(r"(?:^|\.)(\d+)\.")


def block_of(name: str) -> str:
    """Literal examples: "model.layers.3.mlp.experts.0.up_proj.weight" and
    "model.layers.3.mlp.experts.w13_weight" are of block "3", "lm_head.weight" is of ""."""
    match = _BLOCK.search(name)
    return match[1] if match else ""


def sum_of(
    tensor: torch.Tensor,
    dtype: torch.dtype,
    go_on: Callable[[], None] = lambda: None,
    *,
    name: str = "",
) -> int:
    """Return the sum of the hashes of a tensor's numbers in this type; of experts, by their `name`,
    each number alone. `go_on` is called before each piece."""
    import torch

    width = 8 // dtype.itemsize
    words = tensor.dim() >= 2 and tensor.shape[-1] % width == 0 and ".experts." not in name
    values = tensor.detach().reshape(-1)
    piece = _VALUES_ON_CPU if values.device.type == "cpu" else _WORDS_ON_GPU * width
    total = torch.zeros((), dtype=torch.int64, device=values.device)  # which a GPU need not tell
    bits = torch.int64 if words else {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    for start in range(0, values.numel(), piece):
        go_on()
        hashed = values[start : start + piece].to(dtype, copy=True).view(bits).to(torch.int64)
        hashed.bitwise_xor_(hashed >> 32)
        hashed.mul_(_FACTOR)
        hashed.bitwise_xor_(hashed >> 32)
        total += hashed.sum()
    return int(total) & _MASK


def sums_of(tensors: Iterable[tuple[str, int]]) -> WeightSums:
    """Add up what `sum_of` has returned for each parameter's name."""
    sums: WeightSums = {}
    for name, value in tensors:
        block = block_of(name)
        sums[block] = (sums.get(block, 0) + value) & _MASK
    return sums


def sums_of_workers(workers: Sequence[Mapping[str, int]]) -> WeightSums:
    """Add up the parameters of all workers of an engine. Those that have different numbers have
    different parts; those that have the same have one part, which is counted once."""
    names = sorted({name for worker in workers for name in worker})
    return sums_of(
        (name, sum({worker[name] for worker in workers if name in worker})) for name in names
    )


def file_sums(
    tensors: Iterable[tuple[str, torch.Tensor]],
    names: Container[str],
    dtype: str,
    go_on: Callable[[], None],
) -> WeightSums:
    """Return the sums of the tensors with these names, in a type such as "bfloat16"; take all."""
    import torch

    kind = getattr(torch, dtype)
    return sums_of(
        (name, sum_of(tensor, kind, go_on, name=name))
        for name, tensor in tensors
        if name in names and tensor.is_floating_point()
    )


def added_up(parts: Iterable[WeightSums]) -> WeightSums:
    """Return the sums of a version from those of its files."""
    sums: WeightSums = {}
    for block, value in ((block, value) for part in parts for block, value in part.items()):
        sums[block] = (sums.get(block, 0) + value) & _MASK
    return sums


def differing(one: WeightSums, other: WeightSums) -> list[str]:
    """Return where two differ, such as `["block 3", "the rest"]`."""
    blocks = [b for b in sorted({*one, *other}, key=_number) if one.get(b, 0) != other.get(b, 0)]
    return [f"block {block}" if block else "the rest" for block in blocks]


def _number(block: str) -> float:
    return float(block or "inf")
