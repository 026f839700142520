"""Bytes of tensors for their files."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

_PINNED_BYTES = 16 * 2**20
"""Of each of two buffers. A larger one would take longer to pin, and copies are fast already."""


class HostCopies:
    """Copies tensors of a GPU to the host, on a stream of its own, a piece ahead of the writer.

    Pinned memory is reused, while a new copy of each tensor would fault new pages. For one
    thread."""

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []
        self._stream: torch.cuda.Stream | None = None

    def pieces(self, tensor: Tensor) -> Iterator[memoryview]:
        """Yield a tensor's bytes. A piece is valid until the next one."""
        tensor = tensor.contiguous()
        if tensor.device.type == "cuda":
            yield from self._copied(tensor.reshape(-1).view(torch.uint8))
        else:
            yield _bytes_at(tensor)

    def _copied(self, content: Tensor) -> Iterator[memoryview]:
        if self._stream is None:
            self._stream = torch.cuda.Stream(content.device)
            self._buffers = [
                torch.empty(_PINNED_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)
            ]
        self._stream.wait_stream(torch.cuda.current_stream(content.device))
        before: tuple[Tensor, torch.cuda.Event] | None = None
        for buffer, piece in zip(itertools.cycle(self._buffers), content.split(_PINNED_BYTES)):
            with torch.cuda.stream(self._stream):
                copy = buffer[: piece.numel()].copy_(piece, non_blocking=True)
                copied = self._stream.record_event()
            if before is not None:
                yield _arrived(*before)
            before = copy, copied
        if before is not None:
            yield _arrived(*before)


def _arrived(copy: Tensor, copied: torch.cuda.Event) -> memoryview:
    copied.synchronize()
    return _bytes_at(copy)


def _bytes_at(tensor: Tensor) -> memoryview:
    # After `numpy()`, the storage of a gathered tensor could not be emptied.
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr()))
