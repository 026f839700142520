"""The whole weights of a model for publishing, as in its own files, gathered a group at a time."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from trainer_service.backends.base import Export
from trainer_service.backends.sharding import ShardGroups
from trainer_service.models.huggingface import find_blocks, persistent_buffers

if TYPE_CHECKING:
    from torch import Tensor


class WholeWeights:
    """Create it after the model is loaded and sharded."""

    def __init__(self, model: nn.Module, groups: ShardGroups, *, dtype: torch.dtype) -> None:
        self._model = model
        self._groups = groups
        self._dtype = dtype
        # True if the model's files differ in layout from its modules (fused experts).
        self._converts = bool(getattr(model, "_weight_conversions", None))
        names = {module: name for name, module in model.named_modules()}
        blocks = find_blocks(model) if self._converts else []
        self._block_prefixes: list[str] = [names[block] for block in blocks]

    @cached_property
    def exports(self) -> Sequence[Export]:
        found = [
            Export(name, tuple(buffer.shape), buffer.dtype, unit=name)
            for name, buffer in persistent_buffers(self._model).items()
        ]
        for group in self._groups.names:
            for unit, names in self._units_of(group).items():
                parts = {
                    name: torch.empty(
                        self._model.get_parameter(name).shape, dtype=self._dtype, device="meta"
                    )
                    for name in names
                }
                for name, tensor in self._file_layout(parts).items():
                    found.append(Export(name, tuple(tensor.shape), tensor.dtype, unit))
        return found

    @property
    def are_parameters(self) -> bool:
        """True if tensors are parameters and buffers themselves, unless gathered."""
        parameters = self._model.parameters()
        return not self._converts and all(each.dtype == self._dtype for each in parameters)

    def tensors_of(self, units: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        for name, buffer in persistent_buffers(self._model).items():
            if name in units:
                yield name, buffer.detach()
        self._groups.reshard()
        for group in self._groups.gathered():
            for unit, names in self._units_of(group).items():
                whole = {name: self._whole(name) for name in names}
                if unit not in units:
                    continue
                for name, tensor in self._file_layout(whole).items():
                    yield name, tensor.to(self._dtype)

    def _units_of(self, group: Sequence[str]) -> dict[str, list[str]]:
        units: dict[str, list[str]] = {}
        for name in group:
            units.setdefault(self._unit(name), []).append(name)
        return units

    def _unit(self, name: str) -> str:
        """One tensor, or a whole block if the files combine several of its tensors."""
        for prefix in self._block_prefixes:
            if name.startswith(f"{prefix}."):
                return prefix
        return name

    def _whole(self, name: str) -> Tensor:
        """A parameter. Its group must be gathered."""
        parameter = self._model.get_parameter(name).detach()
        if isinstance(parameter, DTensor):  # ranks that compute together have a part each
            parameter = parameter.full_tensor()
        return parameter

    def _file_layout(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        if not self._converts:
            return tensors
        from transformers.core_model_loading import revert_weight_conversion

        reverted: dict[str, Tensor] = revert_weight_conversion(self._model, tensors)
        return reverted
