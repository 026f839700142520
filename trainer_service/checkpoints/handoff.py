"""Keeps a version's weights in memory, too, for a sampler on the same device to copy.

If there is no room, the log says why, and the sampler reads the files."""

from __future__ import annotations

import math
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch

from tandem.agent.host import free_memory_bytes
from tandem.errors import describe
from tandem.telemetry import get_log
from tandem.v1 import common_pb2
from tandem.weights import Manifest
from tandem.weights.tensors import STORED_TYPES
from trainer_service.backends.base import TrainerBackend

if TYPE_CHECKING:
    from torch import Tensor

KEPT_SECONDS = 900.0
"""An unreleased copy is freed after this time. A later sampler reads the files."""
_TYPES = {stored: name.removeprefix("torch.") for name, stored in STORED_TYPES.items()}
_ALIGNMENT = 512
"""Of each tensor, in bytes."""


def keep_copy(name: str, backend: TrainerBackend, *, held: int = 0) -> KeptCopy | None:
    """Return memory for a copy of the next version, or None if there is no room.

    The memory plan's needs and the `held` bytes of unreleased earlier copies stay free."""
    size = sum(_aligned(export.bytes) for export in backend.exports())
    reason = ""
    if size > (room := _room(backend, held)):
        reason = f"{size} bytes are needed, and {room} are to spare"
    else:
        try:
            return KeptCopy(name, size, backend)
        except (OSError, RuntimeError) as error:  # torch raises RuntimeError for full memory
            reason = describe(error)
    get_log().warning("handoff_not_kept", version=name, reason=reason)
    return None


class KeptCopy:
    def __init__(self, name: str, size: int, backend: TrainerBackend) -> None:
        self._message = common_pb2.Handoff(name=name, bytes=size, dtype=backend.dtype)
        self._end = 0
        self._failure = ""
        self._deadline: threading.Timer | None = None
        self._memory = (_OnGpu if backend.device == "cuda" else _OnHost)(size)

    @property
    def name(self) -> str:
        return self._message.name

    @property
    def bytes(self) -> int:
        return self._message.bytes

    def copying(self, tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors:
            if not self._failure:
                try:
                    self._copy(name, tensor)
                except RuntimeError as error:  # the files are still written
                    self._failure = describe(error)
            yield name, tensor

    def _copy(self, name: str, tensor: Tensor) -> None:
        content = self._memory.bytes[self._end : self._end + tensor.nbytes]
        content.view(tensor.dtype).view(tensor.shape).copy_(tensor)
        self._message.tensors.add(
            name=name,
            dtype=STORED_TYPES[str(tensor.dtype)],
            shape=tensor.shape,
            offset=self._end,
        )
        self._end += _aligned(tensor.nbytes)

    def tensors(self) -> dict[str, Tensor]:
        """Return the copied tensors. Their memory stays after `close` as long as one of them."""
        found = {}
        for each in self._message.tensors:
            dtype: torch.dtype = getattr(torch, _TYPES[each.dtype])
            size = math.prod(each.shape) * dtype.itemsize
            content = self._memory.bytes[each.offset : each.offset + size]
            found[each.name] = content.view(dtype).view(tuple(each.shape))
        return found

    def offer(
        self, manifest: Manifest, *, on_deadline: Callable[[], None]
    ) -> common_pb2.Handoff | None:
        """Let another process open the memory. Return its location, or None if tensors are missing.

        `on_deadline` is called from a thread unless the copy is closed before its deadline."""
        self._message.manifest = manifest.model_dump_json().encode()
        if not self._failure:
            try:
                self._memory.offer(self._message)
            except RuntimeError as error:  # some allocators have no sharable memory
                self._failure = describe(error)
        if self._failure:
            get_log().warning("handoff_not_kept", version=self.name, reason=self._failure)
            return None
        self._deadline = threading.Timer(KEPT_SECONDS, on_deadline)
        self._deadline.daemon = True
        self._deadline.start()
        return self._message

    @property
    def outlives_close(self) -> bool:
        """True if a reader that has it open may continue after `close`."""
        return self._memory.outlives_close

    def close(self) -> None:
        """Free the memory, whether its reader has finished, never opened it, or was killed."""
        if self._deadline is not None:
            self._deadline.cancel()
        self._memory.close()


class _OnHost:
    """A file without a name, which ends with the processes that have it open."""

    outlives_close = True

    def __init__(self, size: int) -> None:
        self._file = os.memfd_create("tandem-weights")
        try:
            os.posix_fallocate(self._file, 0, size)
            self.bytes = torch.frombuffer(mmap.mmap(self._file, size), dtype=torch.uint8)
        except OSError:
            os.close(self._file)
            raise

    def offer(self, message: common_pb2.Handoff) -> None:
        inode = os.fstat(self._file).st_ino
        message.host.CopyFrom(
            common_pb2.Handoff.HostMemory(pid=os.getpid(), file=self._file, inode=inode)
        )

    def close(self) -> None:
        del self.bytes  # readers keep their mappings
        os.close(self._file)


class _OnGpu:
    """A torch storage. A file in /dev/shm counts its reader, one other process, from the sharing
    on."""

    outlives_close = False

    def __init__(self, size: int) -> None:
        self.bytes = torch.empty(size, dtype=torch.uint8, device="cuda")
        self._counter: tuple[bytes, int] | None = None

    def offer(self, message: common_pb2.Handoff) -> None:
        _, handle, _, offset, counter, counter_offset, event, sync = (
            self.bytes.untyped_storage()._share_cuda_()
        )
        self._counter = counter, counter_offset
        device = torch.cuda.get_device_properties(self.bytes.device)
        message.cuda.CopyFrom(
            common_pb2.Handoff.CudaMemory(
                device_uuid=str(device.uuid),
                handle=handle,
                storage_offset=offset,
                counter_handle=counter,
                counter_offset=counter_offset,
                event_handle=event,
                event_sync_required=sync,
            )
        )

    def close(self) -> None:
        if self._counter is not None:
            # A reader that has finished has released it too. A negative count is harmless.
            torch.UntypedStorage._release_ipc_counter(*self._counter)
        device = self.bytes.device
        del self.bytes
        with torch.cuda.device(device):
            torch.cuda.ipc_collect()
            torch.cuda.empty_cache()  # torch's cached memory is unavailable to other processes


def free_unused(device: str) -> None:
    """Give memory of tensors that nobody has any more back to the current device."""
    if device == "cuda":
        torch.cuda.empty_cache()


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _room(backend: TrainerBackend, held: int) -> int:
    room: int
    if backend.device == "cuda":
        kept = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        room = torch.cuda.mem_get_info()[0] + kept
    else:
        room = free_memory_bytes()
    if (plan := backend.plan) is not None:
        room = min(room, plan.available.device - sum(plan.device.values()) - held)
    return room
