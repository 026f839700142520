"""Copies tensors from the page cache into pinned memory, so that a GPU can copy them itself.

Otherwise the driver copies in one thread through a small buffer, and the engine waits. Here,
threads copy the next tensors meanwhile. With several workers, each
sends only its own part over the bus.

Every tensor has its own memory from torch, freed with its last reference. A fixed buffer would not
do, because vLLM keeps tensors until their layer is complete."""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tandem.agent.host import free_memory_bytes
from tandem.errors import describe, without_paths
from tandem.telemetry import get_log

if TYPE_CHECKING:
    import torch

Allocate = Callable[[int], "torch.Tensor"]
"""Returns that many bytes as a tensor. Raises `RuntimeError` without memory."""

_AHEAD_BYTES = 256 * 2**20
_MOST_BYTES = 4 * 2**30
_SHARE = 4
"""Staging may use a quarter of the free memory."""
_SLICE_BYTES = 16 * 2**20
_MOST_THREADS = 8
_MOST_WORKERS = 4


def staging_threads(device: str, *, workers: int) -> int:
    """Return the number of staging threads of a worker. 0 means no staging.

    Each worker stages all tensors but needs only a part. From five workers on, unpinned memory
    should be as fast, by arithmetic."""
    if device != "cuda" or workers > _MOST_WORKERS:
        return 0
    return max(1, min(_MOST_THREADS, len(os.sched_getaffinity(0)) // workers))


def pinned(size: int) -> torch.Tensor:
    """Return pinned memory. Torch rounds it to powers of two, and caches it until a sleep of level
    2."""
    import torch

    return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)


@contextmanager
def staged(
    stored: Iterable[tuple[str, torch.Tensor]],
    *,
    threads: int,
    allocate: Allocate = pinned,
    ahead: int = _AHEAD_BYTES,
    most: int | None = None,
) -> Iterator[Iterator[tuple[str, torch.Tensor]]]:
    """Yield the names and values of tensors, in order, in staged memory.

    Without threads or memory, tensors come as they are stored. Up to `ahead` bytes are staged in
    advance, and a larger tensor alone. `most` also counts taken tensors in use. Its default is 4
    GiB, but at most a quarter of the free memory, because the system grants pinned memory that it
    does not have. Iteration raises the errors of `stored`.
    """
    if not threads:
        yield iter(stored)
        return
    pool = ThreadPoolExecutor(threads, thread_name_prefix="staging")
    if most is None:
        most = min(_MOST_BYTES, free_memory_bytes() // _SHARE)
    staging = _Staging(pool, allocate, most=most)
    tensors = staging.tensors(stored, ahead=ahead)
    try:
        yield tensors
    finally:
        pool.shutdown(cancel_futures=True)
        tensors.close()
    get_log().info("weights_staged", bytes=staging.staged, others=staging.others, threads=threads)


@dataclass(frozen=True, eq=False)
class _Staged:
    """A tensor that is being copied, or a stored one."""

    name: str
    value: torch.Tensor
    filling: Sequence[Future[None]] = ()

    def filled(self) -> tuple[str, torch.Tensor]:
        for each in self.filling:
            each.result()
        return self.name, self.value


class _Staging:
    """One load. `staged` and `others` count staged and unstaged bytes."""

    def __init__(self, pool: Executor, allocate: Allocate, *, most: int) -> None:
        self._pool = pool
        self._allocate = allocate
        self._most = most
        self._in_use: list[tuple[weakref.ref[torch.UntypedStorage], int]] = []
        self._refused = False
        self.staged = self.others = 0

    def tensors(
        self, stored: Iterable[tuple[str, torch.Tensor]], *, ahead: int
    ) -> Generator[tuple[str, torch.Tensor], None, None]:
        begun: deque[_Staged] = deque()
        waiting = 0
        for name, tensor in stored:
            while begun and waiting + tensor.nbytes > ahead:
                waiting -= begun[0].value.nbytes
                yield begun.popleft().filled()
            begun.append(self._begin(name, tensor))
            waiting += tensor.nbytes
        while begun:
            yield begun.popleft().filled()

    def _begin(self, name: str, stored: torch.Tensor) -> _Staged:
        import torch

        memory = self._memory(stored)
        if memory is None:
            self.others += stored.nbytes
            return _Staged(name, stored)
        self.staged += stored.nbytes
        content, source = memory.numpy(), stored.reshape(-1).view(torch.uint8).numpy()
        slices = (slice(at, at + _SLICE_BYTES) for at in range(0, content.size, _SLICE_BYTES))
        # NumPy copies: torch's threads would wait for one another at each tensor.
        filling = [self._pool.submit(np.copyto, content[each], source[each]) for each in slices]
        # Views of torch's own memory, so that torch knows the end of a copy.
        return _Staged(name, memory.view(stored.dtype).view(stored.shape), filling)

    def _memory(self, stored: torch.Tensor) -> torch.Tensor | None:
        """Return memory for a tensor. None for an empty one, one on a device, or without room."""
        if self._refused or stored.device.type != "cpu" or not stored.nbytes:
            return None
        self._in_use = [(kept, size) for kept, size in self._in_use if kept() is not None]
        in_use = sum(size for _, size in self._in_use)
        if in_use + stored.nbytes > self._most:
            return None
        try:
            memory = self._allocate(stored.nbytes)
        except RuntimeError as error:  # torch's own errors are kinds of it
            self._refused = True
            get_log().warning("weights_not_staged", error=without_paths(describe(error)))
            return None
        self._in_use.append((weakref.ref(memory.untyped_storage()), stored.nbytes))
        return memory
