"""The memory of an engine: its share of a GPU, and its release during sleep.

On a GPU this is vLLM's sleep mode, which vLLM (0.32) lacks on a CPU. There, the pages of a tensor
are given back (`MADV_DONTNEED`, madvise(2)). The tensor keeps its address and reads as zeros until
it is written, so waking is free."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.overrides import TorchFunctionMode

from sampler_service.engine import SleepLevel
from tandem.errors import WorkerStartFailed

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine

_LARGE = 2**20
"""Bytes of a tensor that is worth a mapping of its own."""
OUTSIDE_TORCH = 2**30
"""The part of an engine's GPU budget for the CUDA context and graphs."""
_MADV_DONTNEED = 4
_LIBC = ctypes.CDLL(None, use_errno=True)


def memory_share(wanted: int, *, free: int, total: int) -> float:
    """Return a budget in bytes as a share of the GPU. Raises `WorkerStartFailed` if it is not
    free."""
    if wanted > free:
        raise WorkerStartFailed(
            f"the sampler asks for {wanted / 2**30:.1f} GiB of the GPU's {total / 2**30:.1f}, of "
            f"which {free / 2**30:.1f} GiB are free; lower tandem.sampler_memory or "
            "TANDEM_SAMPLER_GPU_MEMORY_UTILIZATION, or end other programs on the GPU"
        )
    return wanted / total


def cache_bytes(budget: int, *, peak: int) -> int:
    """Return the KV cache's part of a budget, after torch's `peak`.

    Raises `WorkerStartFailed` if there is none."""
    left = budget - peak - OUTSIDE_TORCH
    if left <= 0:
        raise WorkerStartFailed(
            f"the sampler's budget of {budget / 2**30:.1f} GiB leaves nothing for the KV cache: "
            f"weights and activations take {peak / 2**30:.1f} GiB, CUDA takes "
            f"{OUTSIDE_TORCH / 2**30:.1f}; raise tandem.sampler_memory, or "
            "TANDEM_SAMPLER_GPU_MEMORY_UTILIZATION"
        )
    return left


class UnwrittenZeros(TorchFunctionMode):  # type: ignore[misc]
    """Within it, `torch.zeros` of one large dimension on a CPU, as for vLLM's KV cache, returns new
    pages of the kernel.

    They read as zeros, and take memory when they are first written. torch would write each of
    them."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        options = kwargs or {}
        if function is torch.zeros and len(args) == 1 and isinstance(args[0], int):
            dtype = options.get("dtype") or torch.get_default_dtype()
            device, size = torch.device(options.get("device") or "cpu"), args[0] * dtype.itemsize
            if size >= _LARGE and device.type == "cpu":
                pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                return torch.frombuffer(pages, dtype=dtype)
        return function(*args, **options)


class Sleeper:
    """Sleep and wake of an engine, which is idle, and has no adapters when weights are dropped.

    On a GPU this is vLLM's own sleep mode. It keeps buffers, which no weight version contains. On a
    CPU, released memory returns when it is written, so waking does nothing."""

    def __init__(self, engine: LLMEngine, *, on_gpu: bool) -> None:
        self._engine = engine
        self._on_gpu = on_gpu

    def sleep(self, level: SleepLevel) -> None:
        drop = level is SleepLevel.DROP_WEIGHTS
        if not self._on_gpu:
            self._engine.collective_rpc("tandem_cpu_sleep", kwargs={"drop": drop})
            return
        self._engine.sleep(level=int(level))
        if drop:
            self._engine.collective_rpc("tandem_free_pinned")

    def wake(self, part: Literal["weights", "kv_cache"]) -> None:
        if self._on_gpu:
            self._engine.wake_up(tags=[part])


# --- In vLLM's worker, on a CPU -----------------------------------------------------------


def release_pages(tensors: Iterable[torch.Tensor]) -> None:
    """Give the memory of tensors back. A page shared at either end of a storage stays."""
    for storage in {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}.values():
        begin = storage.untyped_storage().data_ptr()
        first = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
        last = (begin + storage.untyped_storage().nbytes()) // mmap.PAGESIZE * mmap.PAGESIZE
        if last <= first:
            continue
        if _LIBC.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _MADV_DONTNEED):
            raise OSError(ctypes.get_errno(), "madvise(MADV_DONTNEED) was refused")


def drop_weights(model: torch.nn.Module) -> None:
    """Free the parameters and the room for adapters. Buffers stay, as no weight version contains
    them."""
    for module in model.modules():
        release_pages(_adapter_room(module))
    release_pages(parameter.data for parameter in model.parameters())


def trim_heap() -> None:
    """Return freed memory to the system (glibc)."""
    _LIBC.malloc_trim(0)


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _adapter_room(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yield the tensors of a layer's adapters: `lora_a_stacked` and the like."""
    for name, value in vars(module).items():
        if name.endswith("_stacked"):
            yield from [value] if isinstance(value, torch.Tensor) else value
