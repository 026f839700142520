"""FSDP2's division of a model among ranks: the mesh, the parameter groups, and gathering."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from tandem.protocol.worker import Layout
from trainer_service.backends.base import World

if TYPE_CHECKING:
    from torch import Tensor


class RankMesh:
    """The ranks of a trainer.

    FSDP shards over `data`: [replicas, shards], or [shards] for a single replica. Matrices are
    divided over `tensor`: [ranks that compute together], or None. Their collectives fail after
    `timeout`."""

    def __init__(self, world: World, layout: Layout, *, timeout: timedelta) -> None:
        if world.size == 1 and not dist.is_initialized():
            _meet_nobody(world.device, timeout=timeout)
        self.tensor: DeviceMesh | None = None
        sizes = {
            "replicas": layout.replicas,
            "shards": layout.shards(world.size),
            "tensor": layout.tensor_parallel,
        }
        if sizes["shards"] == world.size:
            self.data = init_device_mesh(world.device, (world.size,), mesh_dim_names=("shards",))
            return
        names = [name for name, size in sizes.items() if size > 1 or name == "shards"]
        ranks = torch.arange(world.size).view([sizes[name] for name in names])
        groups = [
            dist.new_subgroups_by_enumeration(
                ranks.movedim(dim, -1).reshape(-1, ranks.shape[dim]).tolist(), timeout=timeout
            )[0]
            for dim in range(len(names))
        ]
        mesh = DeviceMesh.from_group(groups, world.device, mesh=ranks, mesh_dim_names=tuple(names))
        self.data = mesh
        if layout.tensor_parallel > 1:
            self.tensor = mesh["tensor"]
            self.data = mesh[tuple(names[:-1])]

    def groups(self) -> list[dist.ProcessGroup]:
        meshes = [self.data] if self.tensor is None else [self.data, self.tensor]
        return [group for mesh in meshes for group in mesh.get_all_groups()]

    def sum_over_replica(self, value: Tensor) -> None:
        dist.all_reduce(value, group=self.data.get_group("shards"))
        if self.tensor is not None:
            dist.all_reduce(value, group=self.tensor.get_group())


def _meet_nobody(device: str, *, timeout: timedelta) -> None:
    for library in ("GLOO", "NCCL"):
        os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        store=dist.HashStore(),
        rank=0,
        world_size=1,
        timeout=timeout,
    )


class ShardGroups:
    """The parameters of a model in groups that FSDP gathers at once.

    There is one group for each entry of `blocks`, and a last one, the root, with all other
    parameters. Create it before anything replaces the model's modules, so that `names` stay valid.
    Without a call of `shard` nothing is gathered."""

    def __init__(self, model: nn.Module, blocks: Sequence[Sequence[nn.Module]]) -> None:
        self._model = model
        self._blocks = [list(group) for group in blocks]
        self._sharded = False
        group_of = {
            parameter: index
            for index, group in enumerate(self._blocks)
            for block in group
            for parameter in block.parameters()
        }
        self.names: list[list[str]] = [[] for _ in range(len(self._blocks) + 1)]
        for name, parameter in model.named_parameters():
            self.names[group_of.get(parameter, -1)].append(name)

    def shard(self, mesh: DeviceMesh, *, dtype: torch.dtype | None, on_host: bool) -> None:
        """Shard the parameters, gathered in `dtype` (None: their own), with gradients summed in
        float32.

        `on_host` keeps both in host memory, pinned beside a GPU."""
        precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        offload = OffloadPolicy()
        if on_host:
            offload = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")
        shard = partial(fully_shard, mesh=mesh, mp_policy=precision, offload_policy=offload)
        for group in self._blocks:
            shard(group, reshard_after_forward=True)
        # Backward needs the root's parameters (embeddings, head) first, so they stay gathered.
        shard(self._model, reshard_after_forward=False)
        self._sharded = True
        if mesh.size() > 1:  # a single rank would divide by one, with memory for the quotient
            for module in self._modules():
                # Losses are sums over all datums, so gradients are summed, not averaged.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)

    def even_parts(self) -> Iterator[Tensor]:
        """This rank's parts of evenly divided parameters. FSDP moves the other parts into larger
        memory."""
        for parameter in self._model.parameters():
            assert isinstance(parameter, DTensor)
            placed = zip(parameter.device_mesh.shape, parameter.placements, strict=True)
            by_rows = math.prod(ranks for ranks, each in placed if each.is_shard(0))
            if parameter.shape[0] % by_rows == 0:
                yield parameter.to_local().detach()

    def _modules(self) -> list[FSDPModule]:
        """One FSDP module per group. Empty if nothing is sharded."""
        return [*(group[0] for group in self._blocks), self._model] if self._sharded else []

    def gathered(self) -> Iterator[Sequence[str]]:
        modules = self._modules() or [None] * len(self.names)
        for module, names in zip(modules, self.names, strict=True):
            if module is not None:
                module.unshard()
            yield names
            if module is not None:
                module.reshard()

    def reshard(self) -> None:
        """Free parameters still gathered, by a forward pass without gradients or a failed loss."""
        for module in self._modules():
            module.reshard()

    def reduce_with_next_backward(self, *, in_replica: bool, between_replicas: bool) -> None:
        """Reduce gradients of the next backward pass within a replica, then between replicas, or
        hold them back."""
        for module in self._modules():
            module.set_requires_gradient_sync(in_replica)
            module.set_requires_all_reduce(between_replicas)

    def forget_backward(self) -> None:
        """Drop the state of a failed forward or backward pass, and all gradients."""
        for module in self._modules()[-1:]:
            module.reset_iter_state()
        for module in self._modules():
            module.unshard()  # some gradients of the failed block were not reduced yet
            for parameter in self._model.parameters():
                parameter.grad = None
            module.reshard()
