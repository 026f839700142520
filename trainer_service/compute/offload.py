"""Moves the state of one rank off its device and back, bit for bit.

Only the storages under the tensors are emptied and later filled again, so references, tied weights
and views stay valid. On a GPU the copies go to pinned host memory on their own stream. On a CPU,
unless state goes to a file, only caches are freed."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import IO, TYPE_CHECKING

import torch
import xxhash

from tandem.errors import CannotSleep, OutOfMemory, StorageFailed, StorageFull, describe
from tandem.v1 import common_pb2
from trainer_service.backends.base import Capability, TrainerBackend
from trainer_service.batches.memory import ran_out_of_memory
from trainer_service.compute.device_memory import DeviceMemory, memory_of
from trainer_service.optimizers import local

if TYPE_CHECKING:
    from torch import Tensor, UntypedStorage

BLOCK_BYTES = 64 * 2**20
"""The largest allocation of host memory, and read or write of a file. Torch rounds pinned
allocations up to a power of two."""
_ALIGNMENT = 512
"""Of each storage's copy, in bytes."""
_BATCH_BYTES = 4 * BLOCK_BYTES


@dataclass
class _Moved:
    """Emptied storages with their sizes, and the file with their contents (None: host memory)."""

    storages: list[UntypedStorage]
    sizes: list[int]
    file: IO[bytes] | None = None
    checksum: int = 0
    bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.bytes = sum(self.sizes)


class Offload:
    """The state of one rank: that of its `backends`, which may share a model.

    `bytes` counts bytes written to files and read."""

    def __init__(
        self,
        backends: Callable[[], Sequence[TrainerBackend]],
        *,
        memory: DeviceMemory | None = None,
    ) -> None:
        self._backends = backends
        self._memory = memory
        self.bytes = 0
        self._blocks: list[Tensor] = []
        self._moved: _Moved | None = None

    @property
    def asleep(self) -> bool:
        return self._moved is not None

    def check_can_sleep(self) -> None:
        """Raise `CannotSleep` if a backend cannot sleep."""
        for backend in self._backends():
            if Capability.SLEEP not in backend.capabilities:
                name = type(backend).__name__
                raise CannotSleep(f"the trainer backend {name} does not know how to sleep")

    def sleep(
        self, *, enough_bytes: int = 0, spill_folder: str = "", most_bytes: int = 0
    ) -> common_pb2.SwitchReply:
        """Move state off the device, optimizer state first, until `enough_bytes` are free there (0:
        all).

        With `spill_folder` it goes to a file. `most_bytes` bounds the host memory or disk used (0:
        no bound). Raises `OutOfMemory` or `StorageFailed`. Then the state is unchanged."""
        assert self._moved is None
        memory = self._memory = self._memory or memory_of(self._backends()[0].device)
        if spill_folder or not memory.is_host:
            _make_own(self._tensors())
        storages = self._choose(enough_bytes)
        moved = _Moved(storages, [storage.nbytes() for storage in storages])
        if memory.is_host and not spill_folder:
            moved = _Moved([], [])
        if most_bytes and moved.bytes > most_bytes:
            raise (StorageFull if spill_folder else OutOfMemory)(
                f"the trainer stays awake: its state is {moved.bytes} bytes, and {most_bytes} are "
                f"left for it {'on the disk' if spill_folder else 'in host memory'}"
            )
        if spill_folder:
            self._write(moved, spill_folder, memory)
            self._blocks.clear()
        elif not memory.is_host:
            self._copy_out(moved, memory)
        _empty(moved.storages)
        self._moved = moved
        if moved.storages:
            gc.collect()  # reference cycles may hold tensors
        memory.give_back()
        return self.switch_reply(bytes_moved=moved.bytes)

    def wake(self) -> common_pb2.SwitchReply:
        """Fill the storages again. After `OutOfMemory` or `StorageFailed`, the rank sleeps on."""
        moved, memory = self._moved, self._memory
        assert moved is not None
        assert memory is not None
        try:
            _allocate(moved)
            if moved.file is not None:
                self._read(moved, moved.file, memory)
            else:
                self._copy_in(moved, memory)
        except (OutOfMemory, StorageFailed):
            _empty(moved.storages)
            memory.give_back()
            raise
        if moved.file is not None:
            moved.file.close()  # it has no name, so closing deletes it
        self._moved = None
        return self.switch_reply(bytes_moved=moved.bytes)

    def switch_reply(self, *, bytes_moved: int = 0) -> common_pb2.SwitchReply:
        reply = common_pb2.SwitchReply(
            bytes_moved=bytes_moved,
            device_bytes=sum(each.nbytes() for each in _storages(self._tensors())),
        )
        if self._moved is not None and self._moved.file is not None:
            reply.disk_bytes = self._moved.bytes
        elif self._moved is not None:
            reply.host_bytes = self._moved.bytes
        return reply

    # --- Selection -------------------------------------------------------------------------

    def _tensors(self) -> list[Tensor]:
        """The tensors in the order of moving. Shared tensors appear once per backend."""
        backends = self._backends()
        states = [each.live_state() for each in backends]
        found: list[Tensor] = []
        for state in states:
            found += state.optimizer
        for state in states:
            found += state.gradients
        for state in states:
            found += state.parameters
        device = backends[0].device
        return [local(tensor) for tensor in found if tensor.device.type == device]

    def _choose(self, enough_bytes: int) -> list[UntypedStorage]:
        storages = _storages(self._tensors())
        if not enough_bytes:
            return storages
        ends = accumulate(storage.nbytes() for storage in storages)
        before = sum(end < enough_bytes for end in ends)
        return storages[: before + 1]

    # --- To host memory --------------------------------------------------------------------

    def _copy_out(self, moved: _Moved, memory: DeviceMemory) -> None:
        self._reserve(sum(map(_aligned, moved.sizes)), memory)
        done: list[tuple[Callable[[], None], list[UntypedStorage]]] = []
        batch: list[UntypedStorage] = []
        size = 0
        with memory.copying():
            for storage, pieces in self._pieces(moved.storages):
                for device, host in pieces:
                    host.copy_(device, non_blocking=True)
                batch.append(storage)
                size += storage.nbytes()
                if size >= _BATCH_BYTES:
                    done.append((memory.mark(), batch))
                    batch, size = [], 0
            done.append((memory.mark(), batch))
        for wait, storages in done:
            wait()
            _empty(storages)

    def _copy_in(self, moved: _Moved, memory: DeviceMemory) -> None:
        with memory.copying():
            for _, pieces in self._pieces(moved.storages):
                for device, host in pieces:
                    device.copy_(host, non_blocking=True)
            wait = memory.mark()
        wait()

    def _reserve(self, size: int, memory: DeviceMemory) -> None:
        blocks = list(self._blocks)
        missing = size - sum(len(block) for block in blocks)
        while missing > 0:
            power = 1 << (missing - 1).bit_length()
            blocks.append(_allocated(memory, min(BLOCK_BYTES, max(power, _ALIGNMENT))))
            missing -= len(blocks[-1])
        self._blocks = blocks

    def _pieces(
        self, storages: Sequence[UntypedStorage]
    ) -> Iterator[tuple[UntypedStorage, list[tuple[Tensor, Tensor]]]]:
        """Each storage's bytes in pieces, with their places in the blocks."""
        blocks = iter(self._blocks)
        free = torch.empty(0, dtype=torch.uint8)
        for storage in storages:
            part, pieces = _as_bytes(storage), []
            while len(part):
                if not len(free):
                    free = next(blocks)
                size = min(len(part), len(free))
                pieces.append((part[:size], free[:size]))
                part, free = part[size:], free[_aligned(size) :]
            yield storage, pieces

    # --- To a file -------------------------------------------------------------------------

    def _write(self, moved: _Moved, folder: str, memory: DeviceMemory) -> None:
        """Write a file without a name, which any end of the process deletes."""
        staging = None if memory.is_host else _allocated(memory, BLOCK_BYTES)
        checksum = xxhash.xxh3_64()
        file: IO[bytes] | None = None
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 (wake closes it)
            for piece in _file_pieces(moved.storages):
                held = piece if staging is None else staging[: len(piece)].copy_(piece)
                file.write(_buffer(held))
                checksum.update(_buffer(held))
                self.bytes += len(held)
            file.flush()
            os.fsync(file.fileno())  # a disk may report only now that it is full
        except OSError as error:
            if file is not None:
                with suppress(OSError):  # closing flushes the unwritten rest
                    file.close()
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            raise (StorageFull if full else StorageFailed)(
                f"the trainer stays awake: its {moved.bytes} bytes could not be written to where "
                f"it was to keep them: {describe(error)}"
            ) from error
        moved.file, moved.checksum = file, checksum.intdigest()

    def _read(self, moved: _Moved, file: IO[bytes], memory: DeviceMemory) -> None:
        staging = None if memory.is_host else _allocated(memory, BLOCK_BYTES)
        checksum = xxhash.xxh3_64()
        try:
            file.seek(0)
            for piece in _file_pieces(moved.storages):
                held = piece if staging is None else staging[: len(piece)]
                file.readinto(_buffer(held))  # type: ignore[attr-defined]
                checksum.update(_buffer(held))
                self.bytes += len(held)
                if staging is not None:
                    piece.copy_(held)
        except OSError as error:
            raise StorageFailed(
                f"the state of a sleeping trainer cannot be read: {describe(error)}"
            ) from error
        if checksum.intdigest() != moved.checksum:
            raise StorageFailed("the file with the state of a sleeping trainer has changed")


def _storages(tensors: Iterable[Tensor]) -> list[UntypedStorage]:
    found: dict[int, UntypedStorage] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes():
            found.setdefault(storage._cdata, storage)
    return list(found.values())


def _make_own(tensors: Iterable[Tensor]) -> None:
    """Copy tensors in memory that cannot be emptied, such as mapped files or NumPy's."""
    copies: dict[int, UntypedStorage] = {}
    for tensor in tensors:
        mapped = tensor.untyped_storage()
        if mapped.resizable():
            continue
        if mapped._cdata not in copies:
            copies[mapped._cdata] = mapped.clone()
        tensor.data = torch.empty(0, dtype=tensor.dtype).set_(
            copies[mapped._cdata], tensor.storage_offset(), tensor.size(), tensor.stride()
        )


def _empty(storages: Iterable[UntypedStorage]) -> None:
    for storage in storages:
        storage.resize_(0)


def _allocate(moved: _Moved) -> None:
    """Give the storages their sizes again. Raises `OutOfMemory`."""
    try:
        for storage, size in zip(moved.storages, moved.sizes, strict=True):
            storage.resize_(size)
    except Exception as error:
        if not ran_out_of_memory(error):
            raise
        raise OutOfMemory(
            f"a sleeping trainer cannot wake: the {moved.bytes} bytes of its state do not fit on "
            "its device, where others may not have left yet"
        ) from error


def _allocated(memory: DeviceMemory, size: int) -> Tensor:
    try:
        return memory.allocate_host(size)
    except Exception as error:
        if not ran_out_of_memory(error):
            raise
        raise OutOfMemory(
            "the trainer stays awake: there is too little host memory for its state. Let fewer "
            "workers sleep at once, or let them write their state to a disk"
        ) from error


def _as_bytes(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _buffer(held: Tensor) -> memoryview:
    """The bytes of a host tensor. After `numpy()` its storage could not be emptied."""
    return memoryview((ctypes.c_ubyte * len(held)).from_address(held.data_ptr()))


def _file_pieces(storages: Iterable[UntypedStorage]) -> Iterator[Tensor]:
    for storage in storages:
        yield from _as_bytes(storage).split(BLOCK_BYTES)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
