"""Sums by which an engine proves that it holds a version's weights, to the last bit.

An engine arranges the numbers of a file differently: q, k and v in one tensor, stacked experts,
padded vocabularies, tied embeddings. So each number is hashed, and the hashes are added per block
of the model. Such a sum does not depend on places, and a zero adds nothing.

A hash covers eight bytes of a row: 4 bfloat16 or 2 float32 numbers. In vectors, in rows of another
multiple, and in experts (which CPU kernels reorder), each number is hashed alone. All numbers are
first converted to the engine's dtype. Different numbers have one sum with a probability of about
2^-32. This detects mistakes, not forgery."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

WeightSums = dict[str, int]
"""Sums by block: the first number in a parameter's name, or "" without one."""

_MASK = 2**64 - 1
_FACTOR = 0x9E3779B97F4A7C15 - 2**64
"""The golden ratio as an odd 64-bit number (Knuth's multiplicative hashing)."""
_WORDS_ON_CPU = 2**14
"""Words hashed at once on a CPU, so that they stay in a core's cache."""
_WORDS_ON_GPU = 2**21
"""Words hashed at once on a GPU: 48 MiB of its memory."""
_BLOCK = re.compile(r"(?:^|\.)(\d+)\.")


def block_of(name: str) -> str:
    """Return a parameter's block: "3" for "model.layers.3.mlp.experts.0.up_proj.weight", and "" for
    "lm_head.weight"."""
    match = _BLOCK.search(name)
    return match[1] if match else ""


def sum_of(
    tensor: torch.Tensor,
    dtype: torch.dtype,
    go_on: Callable[[], None] = lambda: None,
    *,
    name: str = "",
) -> int:
    """Return the sum of the hashes of a tensor's numbers in this dtype.

    `name` tells whether it belongs to experts. `go_on` is called before each piece."""
    return int(_sum_on_device(tensor, dtype, go_on, name=name)) & _MASK


class TensorSums:
    """The sums of tensors on their way to a file. A GPU's are read together, at the end."""

    def __init__(self, dtype: str) -> None:
        """`dtype` is such as "bfloat16"."""
        self._dtype = dtype
        self._sums: dict[str, torch.Tensor | int] = {}

    def summing(
        self, tensors: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        import torch

        dtype = getattr(torch, self._dtype)
        for name, tensor in tensors:
            if tensor.is_floating_point():
                self._sums[name] = _sum_on_device(tensor, dtype, name=name)
            yield name, tensor

    def by_tensor(self) -> dict[str, int]:
        return {name: int(value) & _MASK for name, value in self._sums.items()}


def _sum_on_device(
    tensor: torch.Tensor,
    dtype: torch.dtype,
    go_on: Callable[[], None] = lambda: None,
    *,
    name: str,
) -> torch.Tensor | int:
    """Return the sum as a signed number. On a GPU, it stays there, and nobody waits for it."""
    import torch

    width = 8 // dtype.itemsize
    words = tensor.dim() >= 2 and tensor.shape[-1] % width == 0 and ".experts." not in name
    values = tensor.detach().reshape(-1)
    if values.device.type == "cpu":
        return _sum_on_host(values, dtype, go_on, width=width if words else 1)
    piece = _WORDS_ON_GPU * width
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    bits = torch.int64 if words else {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    for start in range(0, values.numel(), piece):
        go_on()
        hashed = values[start : start + piece].to(dtype, copy=True).view(bits).to(torch.int64)
        hashed.bitwise_xor_(hashed >> 32)
        hashed.mul_(_FACTOR)
        hashed.bitwise_xor_(hashed >> 32)
        total += hashed.sum()
    return total


def _sum_on_host(
    values: torch.Tensor,
    dtype: torch.dtype,
    go_on: Callable[[], None],
    *,
    width: int,
) -> int:
    """Like the loop for GPUs, in numpy: its buffers are reused, and torch takes four times as long.

    A word has `width` values."""
    hashed, shifted = np.empty((2, min(_WORDS_ON_CPU, values.numel())), np.int64)
    total = 0
    for start in range(0, values.numel(), _WORDS_ON_CPU * width):
        go_on()
        piece = values[start : start + _WORDS_ON_CPU * width].to(dtype).contiguous()
        # After `numpy()`, the storage of a gathered tensor could not be emptied.
        content = (ctypes.c_ubyte * piece.nbytes).from_address(piece.data_ptr())
        words = np.frombuffer(content, np.int64 if width > 1 else f"i{dtype.itemsize}")
        one, two = hashed[: words.size], shifted[: words.size]
        np.right_shift(words, 32, out=two, dtype=np.int64)
        np.bitwise_xor(words, two, out=one)
        np.multiply(one, _FACTOR, out=one)
        np.right_shift(one, 32, out=two)
        np.bitwise_xor(one, two, out=one)
        total += int(one.sum())
    return total


def sums_of(tensors: Iterable[tuple[str, int]]) -> WeightSums:
    """Add up the results of `sum_of` by block, from parameters' names."""
    sums: WeightSums = {}
    for name, value in tensors:
        block = block_of(name)
        sums[block] = (sums.get(block, 0) + value) & _MASK
    return sums


def sums_of_workers(workers: Sequence[Mapping[str, int]]) -> WeightSums:
    """Add up the sums of an engine's workers.

    Workers use different names for different parts. A shared part is counted once."""
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
    """Return the sums of the tensors in `names`, in a dtype such as "bfloat16". Reads all
    tensors."""
    import torch

    kind = getattr(torch, dtype)
    return sums_of(
        (name, sum_of(tensor, kind, go_on, name=name))
        for name, tensor in tensors
        if name in names and tensor.is_floating_point()
    )


def added_up(parts: Iterable[WeightSums]) -> WeightSums:
    sums: WeightSums = {}
    for block, value in ((block, value) for part in parts for block, value in part.items()):
        sums[block] = (sums.get(block, 0) + value) & _MASK
    return sums


def differing(one: WeightSums, other: WeightSums) -> list[str]:
    """Return the places where two sums differ, such as `["block 3", "the rest"]`."""
    blocks = [b for b in sorted({*one, *other}, key=_number) if one.get(b, 0) != other.get(b, 0)]
    return [f"block {block}" if block else "the rest" for block in blocks]


def _number(block: str) -> float:
    return float(block or "inf")
