"""Where a model's `load_weights` copies each tensor, noted once and repeated by later loads.

vLLM finds a tensor's parameter, and its place in a fused one, anew at each load. That takes longer
than the copies of a small model. The sums of each load prove the places."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from torch import Tensor

Named = Iterable[tuple[str, "Tensor"]]


@dataclass(frozen=True, eq=False)
class PartCopy:
    """A copy of a part of a loaded tensor, at `offset` in elements, to `target` in a parameter."""

    target: Tensor
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def storage(self) -> int:
        return int(self.target.untyped_storage().data_ptr())

    def repeat(self, loaded: Tensor) -> None:
        start = loaded.storage_offset() + self.offset
        self.target.copy_(loaded.as_strided(self.size, self.stride, start))


class CopiedModel:
    """Loads a model's tensors in place. Its parameters must hold loaded numbers unchanged.

    Make a new one after the weights' memory was dropped: repeated copies leave padding as it is."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._copies: Mapping[str, list[PartCopy]] | None = None
        self._noted_places: list[tuple[int, int]] = []

    @property
    def has_copies(self) -> bool:
        """True if copies were noted, and no parameter has moved since."""
        return self._copies is not None and self._places() == self._noted_places

    def repeat_copies(self, tensors: Named) -> set[str]:
        """Returns the names of tensors that were noted and did not come."""
        assert self._copies is not None
        missing = set(self._copies)
        with torch.no_grad():
            for name, tensor in tensors:
                for each in self._copies.get(name, ()):
                    each.repeat(tensor)
                missing.discard(name)
        return missing

    def note_copies(self, tensors: Named, load: Callable[[Named], object]) -> None:
        """Load tensors by `load`, and note its copies if they reach every parameter."""
        self._copies, noted = None, _NotedCopies()
        with torch.no_grad(), noted:
            load(noted.noting(tensors))
        if (copies := noted.copies()) is None:
            return
        filled = {part.storage for parts in copies.values() for part in parts}
        if filled.issuperset(storage for _, storage in self._places()):
            self._copies, self._noted_places = copies, self._places()

    def _places(self) -> list[tuple[int, int]]:
        return [
            (each.data_ptr(), each.untyped_storage().data_ptr())
            for each in self._model.parameters()
        ]


class _NotedCopies(TorchDispatchMode):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self._loaded: dict[str, Tensor] = {}
        self._pairs: list[tuple[Tensor, Tensor]] = []

    def noting(self, tensors: Named) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors:
            self._loaded[name] = tensor
            yield name, tensor

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.ops.aten.copy_.default:
            self._pairs.append((args[0], args[1]))
        return function(*args, **(kwargs or {}))

    def copies(self) -> Mapping[str, list[PartCopy]] | None:
        """Return the copies by tensor. None if a number did not come straight from a tensor."""
        ends = sorted((each.data_ptr(), name) for name, each in self._loaded.items())
        copies: dict[str, list[PartCopy]] = {}
        for target, source in self._pairs:
            name = max((end for end in ends if end[0] <= source.data_ptr()), default=(0, ""))[1]
            loaded = self._loaded.get(name)
            if loaded is None or not loaded.is_contiguous() or source.dtype != loaded.dtype:
                return None
            offset = (source.data_ptr() - loaded.data_ptr()) // loaded.itemsize
            if offset >= loaded.numel():
                return None
            part = PartCopy(target, tuple(source.shape), source.stride(), offset)
            copies.setdefault(name, []).append(part)
        return copies
