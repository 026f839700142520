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
"""Bytes of host memory that stay free."""

_MAPPED_FROM = 17 * 2**16
"""Above 1 MiB, because libraries allocate many buffers of exactly that size. Mapping each anew
nearly doubles the processor time."""
_KEPT_AT_END = 64 * 2**20
_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1
"""Parameters of mallopt(3)."""


def map_large_tensors() -> None:
    """Make glibc map and unmap each large tensor.

    Otherwise freed tensors leave gaps in a heap that fit no tensor of equal size, and the heap
    takes twice the memory."""
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        mallopt(_MMAP_THRESHOLD, _MAPPED_FROM)
        mallopt(_TRIM_THRESHOLD, _KEPT_AT_END)


def device_peaks(device: str) -> tuple[int, int]:
    """Return the peak bytes of tensors on this rank's device, and of torch's reservation. (0, 0) on
    a CPU."""
    if device != "cuda":
        return 0, 0
    return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()


class DeviceMemory(Protocol):
    """The memory that a backend computes in. `is_host`: it is host memory."""

    is_host: bool

    def allocate_host(self, size: int) -> Tensor:
        """Return host memory, uint8 [size], with fast copies to and from the device."""
        ...

    def copying(self) -> AbstractContextManager[None]:
        """Run the block's copies after earlier computation, without waiting for their end."""
        ...

    def mark(self) -> Callable[[], None]:
        """Return a function that waits for the copies so far."""
        ...

    def give_back(self) -> None:
        """Return cached free memory to the system."""
        ...


class CpuMemory:
    is_host = True

    def __init__(self) -> None:
        # Not every C library has it. Without it, glibc keeps freed memory in the process.
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
    is_host = False

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()

    def allocate_host(self, size: int) -> Tensor:
        # Pinning more memory than is free does not fail: the kernel kills some process.
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
    return CudaMemory() if device == "cuda" else CpuMemory()
