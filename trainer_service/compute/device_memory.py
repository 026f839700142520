"""The memory of a device that a rank computes in, and of the host beside it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Protocol

import torch

from tandem.agent.host import free_memory_bytes

if TYPE_CHECKING:
    from torch import Tensor

_LEFT_FREE = 2**30
"""Of the host's memory, in bytes, at least."""

_MAPPED_FROM = 17 * 2**16
"""Bytes. More than a MiB: libraries take buffers of just that, hundreds in a pass over sequences of
128 tokens, and to map each anew nearly doubled the processor time."""
_KEPT_AT_END = 64 * 2**20
_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1
"""Parameters of mallopt(3)."""


def map_large_tensors() -> None:
    """Let the C library of this process map each large tensor, and unmap it, if it is glibc.

    glibc raises its threshold up to 32 MiB when large tensors are freed. They then lie in a heap
    with gaps that no tensor of the same size fits into, and the heap takes twice the memory.
    """
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        mallopt(_MMAP_THRESHOLD, _MAPPED_FROM)
        mallopt(_TRIM_THRESHOLD, _KEPT_AT_END)


def device_peaks(device: str) -> tuple[int, int]:
    """Return the most bytes of this rank's device that tensors have taken so far, and that torch
    has held for them; (0, 0) on a CPU."""
    if device != "cuda":
        return 0, 0
    return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()


class DeviceMemory(Protocol):
    """The memory that a backend computes in. `is_host`: it is the host's own."""

    is_host: bool

    def allocate_host(self, size: int) -> Tensor:
        """Host memory, uint8 [size], that copies to and from the device are fast with."""
        ...

    def copying(self) -> AbstractContextManager[None]:
        """Within, copies come after what was computed before, and need not have ended."""
        ...

    def mark(self) -> Callable[[], None]:
        """What waits for the copies so far."""
        ...

    def give_back(self) -> None:
        """Leaves to others what is free but was kept for later."""
        ...


class CpuMemory:
    """Implements `DeviceMemory` for a CPU."""

    is_host = True

    def __init__(self) -> None:
        # Not every C library has it; with glibc, free memory otherwise stays with the process.
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)

    def allocate_host(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def copying(self) -> AbstractContextManager[None]:
        return nullcontext()

    def mark(self) -> Callable[[], None]:
        return lambda: None

    def give_back(self) -> None:
        if self._trim is not None:
            self._trim(0)


class CudaMemory:
    """Implements `DeviceMemory` for the current GPU."""

    is_host = False

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()

    def allocate_host(self, size: int) -> Tensor:
        # Pinned memory that the host does not have is not refused: the kernel kills somebody.
        if (free := free_memory_bytes()) - size < _LEFT_FREE:
            raise torch.OutOfMemoryError(f"{free} bytes of host memory are free")
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    @contextmanager
    def copying(self) -> Iterator[None]:
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            yield
        current.wait_stream(self._stream)

    def mark(self) -> Callable[[], None]:
        event = torch.cuda.Event()
        event.record(self._stream)
        return event.synchronize  # type: ignore[no-any-return]

    def give_back(self) -> None:
        torch.cuda.empty_cache()
        torch._C._host_emptyCache()  # torch 2.11 has no public name for it


def memory_of(device: str) -> DeviceMemory:
    """That of the device of a backend."""
    return CudaMemory() if device == "cuda" else CpuMemory()
