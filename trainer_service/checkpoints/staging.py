from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from torch.distributed.checkpoint.staging import BlockingAsyncStager

from tandem.errors import OutOfMemory
from tandem.telemetry import get_log
from trainer_service.optimizers import local
from trainer_service.optimizers.staged import pin, unpin

if TYPE_CHECKING:
    from torch import Tensor

Copy = dict[str, "Tensor"]
_SMALL = 2**20
"""Tensors of fewer bytes are not worth a call to pin them."""


class Staging:
    """Copies the state of one run to host memory, while training pauses.

    The memory of a copy from a GPU is pinned and reused, because new memory comes page by page.
    `pin` is None for a CPU."""

    def __init__(self, pin: Callable[[Tensor], None] | None) -> None:
        self._pin = pin
        self._stager: BlockingAsyncStager | None = None
        self._layout: dict[str, tuple[object, object]] = {}
        self._read: Copy | None = None

    def copy(self, state: Mapping[str, Tensor]) -> Copy:
        """Return a copy of the state. Call `end` after it is written. Until then, others get their
        own memory."""
        if self._pin is None or self._read is not None:
            return _copied(state)
        layout = {name: (each.shape, each.dtype) for name, each in state.items()}
        if self._stager is None or layout != self._layout:
            self._read = self._begin(state, self._pin)
            self._layout = layout
        else:
            self._read = self._stager.stage(dict(state))
        return self._read

    def end_copy(self, copy: Copy) -> None:
        if copy is self._read:
            self._read = None

    def free(self) -> None:
        """Keep no memory. A copy that is still being written keeps its own."""
        self._stager = None

    def _begin(self, state: Mapping[str, Tensor], pin: Callable[[Tensor], None]) -> Copy:
        self._stager = None  # free the older memory first
        copy = _copied(state)
        try:
            for each in map(local, copy.values()):
                if each.nbytes >= _SMALL:
                    pin(each)
        except OutOfMemory as error:  # unpinned memory is only slower
            get_log().warning("snapshots_not_pinned", reason=error.message)
        self._stager = BlockingAsyncStager(cache_staged_state_dict=True)
        self._stager.state_dict_cache = copy
        return copy


def staging_of(device: str) -> Staging:
    return Staging(_pin if device == "cuda" else None)


def _copied(state: Mapping[str, Tensor]) -> Copy:
    copy: Copy = BlockingAsyncStager().stage(dict(state))
    return copy


def _pin(tensor: Tensor) -> None:
    pin(tensor)
    weakref.finalize(tensor, unpin, tensor.data_ptr()).atexit = False
