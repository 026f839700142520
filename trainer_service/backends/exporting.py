"""The whole weights of a model as they are published: named and shaped as in the model's own files,
gathered a group at a time."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from trainer_service.backends.base import Export
from trainer_service.backends.owners_gathering import OwnersGathering
from trainer_service.backends.sharding import ShardGroups
from trainer_service.models.huggingface import find_blocks, persistent_buffers

if TYPE_CHECKING:
    from torch import Tensor


class WholeWeights:
    """The whole weights of a model, in `dtype`. Make it once the model is loaded and sharded."""

    def __init__(self, model: nn.Module, groups: ShardGroups, *, dtype: torch.dtype) -> None:
        self._model = model
        self._groups = groups
        self._dtype = dtype
        # Whether the model's files differ in layout from its modules (fused experts).
        self._converts = bool(getattr(model, "_weight_conversions", None))
        names = {module: name for name, module in model.named_modules()}
        blocks = find_blocks(model) if self._converts else []
        self._block_prefixes: list[str] = [names[block] for block in blocks]

    @cached_property
    def exports(self) -> Sequence[Export]:
        """See `TrainerBackend.exports`."""
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

    def of(self, units: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        """See `TrainerBackend.export_weights`."""
        for name, buffer in persistent_buffers(self._model).items():
            if name in units:
                yield name, buffer.detach()
        owners = self._owners(units)
        if owners:
            yield from self._on_owners(units, owners)
            return
        for group in self._groups.gathered():
            for unit, names in self._units_of(group).items():
                whole = {name: self._whole(name) for name in names}
                if unit not in units:
                    continue
                for name, tensor in self._file_layout(whole).items():
                    yield name, tensor.to(self._dtype)

    def _owners(self, units: Collection[str]) -> dict[str, int]:
        """The one rank that wants each unit, where its parameters are gathered there alone: of
        shards on CPUs, which gloo gathers on all ranks in seven times the processor's time. Empty
        where they are gathered on all."""
        self._groups.reshard()
        parameters = [*self._model.parameters()]
        sharded = all(
            isinstance(each, DTensor)
            and each.placements == (Shard(0),)
            and each.device_mesh.device_type == "cpu"
            for each in parameters
        )
        if not sharded:
            return {}
        group = parameters[0].device_mesh.get_group()
        wanted: list[list[str]] = [[] for _ in range(dist.get_world_size(group))]
        dist.all_gather_object(wanted, sorted(units), group=group)
        owners = {unit: rank for rank, names in enumerate(wanted) for unit in names}
        return owners if len(owners) == sum(map(len, wanted)) else {}

    def _on_owners(
        self, units: Collection[str], owners: Mapping[str, int]
    ) -> Iterator[tuple[str, Tensor]]:
        parts = [
            (unit, [self._model.get_parameter(name) for name in names], names)
            for group in self._groups.names
            for unit, names in self._units_of(group).items()
            if unit in owners
        ]
        gathering = OwnersGathering(
            [(owners[unit], parameters) for unit, parameters, _ in parts], dtype=self._dtype
        )
        for place, (unit, _, names) in enumerate(parts):
            whole = gathering.next(place)
            if unit in units:
                yield from self._file_layout(dict(zip(names, whole, strict=True))).items()
        gathering.end()

    def _units_of(self, group: Sequence[str]) -> dict[str, list[str]]:
        """The parameters of a group by unit."""
        units: dict[str, list[str]] = {}
        for name in group:
            units.setdefault(self._unit(name), []).append(name)
        return units

    def _unit(self, name: str) -> str:
        """A unit is one tensor, or a whole block if the files combine several of its tensors."""
        for prefix in self._block_prefixes:
            if name.startswith(f"{prefix}."):
                return prefix
        return name

    def _whole(self, name: str) -> Tensor:
        """A parameter, whose group must be gathered."""
        parameter = self._model.get_parameter(name).detach()
        if isinstance(parameter, DTensor):  # ranks that compute together have a part each
            parameter = parameter.full_tensor()
        return parameter

    def _file_layout(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Converts names and shapes to those of the model's own files."""
        if not self._converts:
            return tensors
        from transformers.core_model_loading import revert_weight_conversion

        reverted: dict[str, Tensor] = revert_weight_conversion(self._model, tensors)
        return reverted
