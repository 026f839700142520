"""Brings tensors from the page cache into pinned memory, from where a GPU copies them itself.

What is not pinned, the driver copies in one thread, through a small pinned buffer of its own, while
the engine waits: 3 to 6 GB/s. Here, threads copy the next tensors, and apply a delta's changes to
them, while the engine takes those before. So each tensor is on the device once, where the engine
puts it: none of the device's memory is needed besides, and a worker of several sends its part alone
over the bus.

Every tensor has memory of its own, which is torch's: freed when nothing refers to it, and taken
again for the next one. The engine keeps what it gets until a layer is whole (vLLM's layerwise
reload), so a buffer that is filled again and again would change what is still to be copied.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sampler_service.weights.files import TensorSource
from tandem.agent.host import free_memory_bytes
from tandem.errors import describe, without_paths
from tandem.telemetry import get_log

if TYPE_CHECKING:
    import torch

Allocate = Callable[[int], "torch.Tensor"]
"""Returns so many bytes of memory as a tensor. Raises `RuntimeError` if there are none."""

_AHEAD_BYTES = 256 * 2**20
_MOST_BYTES = 4 * 2**30
_SHARE = 4
"""Of the free memory, what may be used is one part of so many."""
_SLICE_BYTES = 16 * 2**20
_MOST_THREADS = 8
_MOST_WORKERS = 4


def staging_threads(device: str, *, workers: int) -> int:
    """Return with how many threads a worker of so many stages what it loads; 0: it does not.

    Each stages all tensors, of which it takes a part. By arithmetic, which no GPU has confirmed, to
    copy just its part from memory that is not pinned is as fast from five workers on.
    """
    if device != "cuda" or workers > _MOST_WORKERS:
        return 0
    return max(1, min(_MOST_THREADS, len(os.sched_getaffinity(0)) // workers))


def pinned(size: int) -> torch.Tensor:
    """Return memory from which a GPU copies itself. Torch has it in powers of two, and keeps what
    is freed for later, until a sleep of level 2."""
    import torch

    return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)


@contextmanager
def staged(
    sources: Iterable[TensorSource],
    *,
    threads: int,
    allocate: Allocate = pinned,
    ahead: int = _AHEAD_BYTES,
    most: int | None = None,
) -> Iterator[Iterator[tuple[str, torch.Tensor]]]:
    """Yield the names and values of tensors, in their order, in staged memory; without threads, or
    where there is no memory, as they are stored.

    Up to `ahead` bytes are staged before they are taken, and a larger tensor alone. With what was
    taken and is still referred to, up to `most` are: by default 4 GiB, but no more than a quarter
    of what is free, since pinned memory that a host does not have is not refused. Taking raises
    what reading the sources does, and `LoadFailed` for a damaged patch. At the end of the block no
    thread is left.
    """
    if not threads:
        yield ((source.name, source.tensor()) for source in sources)
        return
    pool = ThreadPoolExecutor(threads, thread_name_prefix="staging")
    if most is None:
        most = min(_MOST_BYTES, free_memory_bytes() // _SHARE)
    staging = _Staging(pool, allocate, most=most)
    tensors = staging.tensors(sources, ahead=ahead)
    try:
        yield tensors
    finally:
        pool.shutdown(cancel_futures=True)
        tensors.close()
    get_log().info("weights_staged", bytes=staging.staged, others=staging.others, threads=threads)


@dataclass(frozen=True, eq=False)
class _Staged:
    """A tensor in memory that is being filled, or as it is stored."""

    name: str
    value: torch.Tensor
    filling: Sequence[Future[None]] = ()

    def filled(self) -> tuple[str, torch.Tensor]:
        for each in self.filling:
            each.result()
        return self.name, self.value


class _Staging:
    """One load. `staged` and `others` are the bytes that were staged, and those that were not."""

    def __init__(self, pool: Executor, allocate: Allocate, *, most: int) -> None:
        self._pool = pool
        self._allocate = allocate
        self._most = most
        self._in_use: list[tuple[weakref.ref[torch.UntypedStorage], int]] = []
        self._refused = False
        self.staged = self.others = 0

    def tensors(
        self, sources: Iterable[TensorSource], *, ahead: int
    ) -> Generator[tuple[str, torch.Tensor], None, None]:
        begun: deque[_Staged] = deque()
        waiting = 0
        for source in sources:
            size = source.stored.nbytes
            while begun and waiting + size > ahead:
                waiting -= begun[0].value.nbytes
                yield begun.popleft().filled()
            begun.append(self._begin(source))
            waiting += size
        while begun:
            yield begun.popleft().filled()

    def _begin(self, source: TensorSource) -> _Staged:
        memory = self._memory(source.stored)
        if memory is None:
            self.others += source.stored.nbytes
            return _Staged(source.name, source.tensor())
        self.staged += source.stored.nbytes
        content = memory.numpy()
        filling = [
            self._pool.submit(source.write, content[start : start + _SLICE_BYTES], start)
            for start in range(0, content.size, _SLICE_BYTES)
        ]
        # Views of torch's own memory, so that torch knows when a copy has ended.
        value = memory.view(source.stored.dtype).view(source.stored.shape)
        return _Staged(source.name, value, filling)

    def _memory(self, stored: torch.Tensor) -> torch.Tensor | None:
        """Return memory for a tensor; None for one that is empty or on a device, where too much is
        in use, and as soon as none is to be had."""
        if self._refused or stored.device.type != "cpu" or not stored.nbytes:
            return None
        self._in_use = [(kept, size) for kept, size in self._in_use if kept() is not None]
        in_use = sum(size for _, size in self._in_use)
        if in_use + stored.nbytes > self._most:
            return None
        try:
            memory = self._allocate(stored.nbytes)
        except RuntimeError as error:  # which torch's own are kinds of
            self._refused = True
            get_log().warning("weights_not_staged", error=without_paths(describe(error)))
            return None
        self._in_use.append((weakref.ref(memory.untyped_storage()), stored.nbytes))
        return memory
