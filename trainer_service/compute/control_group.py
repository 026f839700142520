from __future__ import annotations

import copy
import enum
import itertools
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from google.protobuf.message import Message
    from torch import Tensor

_SIZE = struct.Struct("<q")
_BETWEEN_LOOKS = 0.005
"""Seconds. A store's own wait would keep other threads from it."""


class Op(enum.IntEnum):
    """Operations that rank 0 announces, each for one run. `HEARTBEAT` only keeps idle ranks from
    timing out."""

    HEARTBEAT = 0
    FORWARD_BACKWARD = 1
    OPTIM_STEP = 2
    PUBLISH = 3
    SAVE_CHECKPOINT = 4
    LOAD_CHECKPOINT = 5
    DROP_GRADIENTS = 6
    SNAPSHOT = 7
    SLEEP = 8
    WAKE = 9
    ADD_RUN = 10
    REMOVE_RUN = 11
    VERIFY_CHECKPOINT = 12


def _buffer(data: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(bytearray(data), np.uint8))


class ControlGroup:
    """Carries operations from rank 0 to the other ranks, and their results back.

    `group` is a gloo group beside the computing group, or None for a single rank. `store` carries
    results that come after their operations. Every wait ends after `timeout`. Each run has its own
    `ControlGroup`, with its number `run`."""

    def __init__(
        self,
        *,
        rank: int,
        size: int,
        group: dist.ProcessGroup | None,
        timeout: timedelta = timedelta(0),
        run: int = 0,
        store: dist.Store | None = None,
    ) -> None:
        self.rank = rank
        self.size = size
        self.group = group
        self.timeout = timeout
        self.run = run
        self._store = store
        self._later = itertools.count()  # of all runs, because every rank counts alike

    def of_run(self, run: int) -> ControlGroup:
        other = copy.copy(self)
        other.run = run
        return other

    def broadcast(self, op: Op, message: Message | None = None) -> None:
        if self.group is None:
            return
        payload = b"" if message is None else message.SerializeToString()
        dist.broadcast(torch.tensor([op, self.run, len(payload)]), src=0, group=self.group)
        if payload:
            dist.broadcast(_buffer(payload), src=0, group=self.group)

    def heartbeat(self) -> None:
        """Restart the other ranks' timeout while rank 0 is idle. Raises if a rank has died."""
        self.broadcast(Op.HEARTBEAT)

    def receive(self) -> tuple[Op, int, bytes]:
        """Wait for rank 0's next operation. Return it with the run's number and the request."""
        header = torch.zeros(3, dtype=torch.int64)
        dist.broadcast(header, src=0, group=self.group)
        op, run, size = header.tolist()
        if not size:
            return Op(op), run, b""
        payload = torch.empty(size, dtype=torch.uint8)
        dist.broadcast(payload, src=0, group=self.group)
        return Op(op), run, payload.numpy().tobytes()

    @contextmanager
    def patient(
        self, timeout: timedelta, others: Sequence[dist.ProcessGroup] = ()
    ) -> Iterator[None]:
        """Raise the timeout of collectives, also of `others`, within the block.

        All ranks leave the block together. An error in it ends the process."""
        if self.group is None:
            yield
            return
        groups = [dist.group.WORLD, self.group, *others]
        for group in groups:
            group.set_timeout(max(timeout, self.timeout))
        yield
        dist.barrier(self.group)
        for group in groups:
            group.set_timeout(self.timeout)

    def gather_known(self, payload: bytes, *, sizes: list[int]) -> list[bytes]:
        """Gather payloads of known `sizes` (bytes, by rank). Only rank 0 gets them."""
        if self.group is None:
            return [payload]
        if self.rank:
            if payload:
                dist.send(_buffer(payload), dst=0, group=self.group)
            return []
        received = [payload]
        for rank in range(1, self.size):
            buffer = torch.empty(sizes[rank], dtype=torch.uint8)
            if sizes[rank]:
                dist.recv(buffer, src=rank, group=self.group)
            received.append(buffer.numpy().tobytes())
        return received

    def gather(self, payload: bytes) -> list[bytes]:
        """Gather payloads of any size. Only rank 0 gets them."""
        heads = self.gather_known(_SIZE.pack(len(payload)), sizes=[_SIZE.size] * self.size)
        sizes = [int(_SIZE.unpack(head)[0]) for head in heads]
        return self.gather_known(payload, sizes=sizes)

    def expect_later(self) -> LaterResults:
        """Return the place for the ranks' results that come after this operation. All ranks call
        it."""
        return LaterResults(self._store, next(self._later), rank=self.rank, size=self.size)


class LaterResults:
    """The ranks' results of work that outlasts its operation."""

    def __init__(self, store: dist.Store | None, number: int, *, rank: int, size: int) -> None:
        self._store = store
        self._keys = [f"tandem/later/{number}/{rank}" for rank in range(size)]
        self._rank = rank

    def tell(self, result: str) -> None:
        """Tell rank 0 this rank's result, from any thread."""
        if self._store is not None and self._rank:
            self._store.set(self._keys[self._rank], result)

    def wait_for_others(self, *, seconds: float) -> Iterator[tuple[int, str]]:
        """Yield the other ranks and their results as they come, on rank 0, in any thread.

        Raises `OSError` if one does not come, or the store is gone."""
        waiting = {rank: key for rank, key in enumerate(self._keys) if rank}
        until, store = time.monotonic() + seconds, self._store
        while waiting and store is not None:
            try:
                come = {rank: key for rank, key in waiting.items() if store.check([key])}
                results = [(rank, store.get(key).decode()) for rank, key in come.items()]
                for key in come.values():
                    store.delete_key(key)
            except RuntimeError as error:
                raise OSError(f"the store of the ranks is gone: {error}") from error
            yield from results
            waiting = {rank: key for rank, key in waiting.items() if rank not in come}
            if not come and time.monotonic() > until:
                raise TimeoutError(f"rank {min(waiting)} told no result for {seconds:g} s")
            if not come:
                time.sleep(_BETWEEN_LOOKS)
