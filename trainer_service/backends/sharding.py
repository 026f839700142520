"""How FSDP2 divides a model among ranks: the mesh that they are, which parameters are gathered
together, and the calls that gather them and let them go."""

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
    """The ranks of a trainer: `data`, over which FSDP shards, is [replicas, shards] or, of a single
    replica, [shards]; `tensor`, over which matrices are divided, [ranks that compute together], or
    None. A collective of some of them fails after `timeout`, as one of all does."""

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
        """Those of its collectives."""
        meshes = [self.data] if self.tensor is None else [self.data, self.tensor]
        return [group for mesh in meshes for group in mesh.get_all_groups()]

    def sum_over_replica(self, value: Tensor) -> None:
        """Adds up a tensor in place over the ranks that hold one replica."""
        dist.all_reduce(value, group=self.data.get_group("shards"))
        if self.tensor is not None:
            dist.all_reduce(value, group=self.tensor.get_group())


def _meet_nobody(device: str, *, timeout: timedelta) -> None:
    """Makes the process group of a single rank."""
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
    """The parameters of a model in groups, each of which FSDP gathers at once: those of each group
    of `blocks`, and the root with all others last. `names` are those of the parameters, by group; a
    tied weight comes once.

    Make it before anything replaces the model's modules: parameters keep their names. Without a
    call of `shard` all is as before, and nothing is gathered.
    """

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
        """Shards the parameters over the ranks of a mesh. They are gathered in `dtype` (None: as
        they are kept), and their gradients are added up in float32. `on_host`: both are kept in the
        host's memory, pinned beside a GPU, and come to the device by group."""
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
        if mesh.size() > 1:  # a rank alone would divide by one, in memory for the quotient
            for module in self._modules():
                # Losses are sums over all datums, so gradients are summed, not averaged.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)

    def even_parts(self) -> Iterator[Tensor]:
        """This rank's parts of parameters of which all ranks have as much. FSDP moves those of the
        others into larger memory."""
        for parameter in self._model.parameters():
            assert isinstance(parameter, DTensor)
            placed = zip(parameter.device_mesh.shape, parameter.placements, strict=True)
            by_rows = math.prod(ranks for ranks, each in placed if each.is_shard(0))
            if parameter.shape[0] % by_rows == 0:
                yield parameter.to_local().detach()

    def _modules(self) -> list[FSDPModule]:
        """One for each group; none where nothing is sharded."""
        return [*(group[0] for group in self._blocks), self._model] if self._sharded else []

    def gathered(self) -> Iterator[Sequence[str]]:
        """Gathers one group after the other, and yields its parameters' names."""
        modules = self._modules() or [None] * len(self.names)
        for module, names in zip(modules, self.names, strict=True):
            if module is not None:
                module.unshard()
            yield names
            if module is not None:
                module.reshard()

    def reshard(self) -> None:
        """Lets go of all that is gathered: of the root after a forward pass without gradients, or
        after a loss that failed."""
        for module in self._modules():
            module.reshard()

    def reduce_with_next_backward(self, *, in_replica: bool, between_replicas: bool) -> None:
        """Whether the gradients of the next backward pass are added up over the ranks of a replica,
        and then over replicas, with all that was kept of those before; otherwise they are kept."""
        for module in self._modules():
            module.set_requires_gradient_sync(in_replica)
            module.set_requires_all_reduce(between_replicas)

    def forget_backward(self) -> None:
        """Drops what a forward or backward pass that failed has left, and all gradients."""
        for module in self._modules()[-1:]:
            module.reset_iter_state()
        for module in self._modules():
            module.unshard()  # of the block that failed, some gradients were not reduced yet
            for parameter in self._model.parameters():
                parameter.grad = None
            module.reshard()
