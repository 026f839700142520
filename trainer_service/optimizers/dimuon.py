from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DeviceMesh, DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from trainer_service.optimizers.adamw import Moments, moment_shapes
from trainer_service.optimizers.base import AdamWSettings, DiMuonSettings, StepSettings, clip

if TYPE_CHECKING:
    from torch import Tensor


ADAMW_BETA2 = 0.95
ADAMW_EPS = 1e-12
"""The SDK's defaults of AdamParams, which its DimuonParams lack."""


class DiMuon:
    """torch.optim.Muon for two-dimensional matrices that are not `outer`, torch's AdamW for the
    others.

    Muon: Jordan et al. 2024, kellerjordan.github.io/posts/muon. Both use one learning rate: an
    orthogonal update is scaled by 0.2·√max(rows, columns), so its root mean square is that of AdamW
    ("match_rms_adamw", Moonshot, arXiv 2502.16982). Nesterov momentum, five Newton-Schulz steps, no
    weight decay. State: `momentum_buffer` of a matrix, AdamW's of the others."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        *,
        outer: Collection[str],
        sum_over_ranks: Callable[[Tensor], None],
    ) -> None:
        self._parameters = dict(parameters)
        self._sum_over_ranks = sum_over_ranks
        hidden = {
            name: each
            for name, each in self._parameters.items()
            if each.ndim == 2 and name not in outer
        }
        self._moments = Moments(
            {name: each for name, each in self._parameters.items() if name not in hidden}
        )
        self._plain = PlainMuon({n: p for n, p in hidden.items() if not isinstance(p, DTensor)})
        self._sharded = ShardedMuon({n: p for n, p in hidden.items() if isinstance(p, DTensor)})

    def step(self, settings: StepSettings) -> dict[str, float]:
        assert isinstance(settings, DiMuonSettings)
        norm = clip(
            self._parameters.values(),
            limit=settings.grad_clip_norm,
            sum_over_ranks=self._sum_over_ranks,
        )
        self._plain.step(settings)
        self._sharded.step(settings)
        self._moments.step(
            AdamWSettings(
                learning_rate=settings.learning_rate,
                beta1=settings.beta1,
                beta2=ADAMW_BETA2,
                eps=ADAMW_EPS,
                weight_decay=0.0,
                grad_clip_norm=0.0,
            )
        )
        self.drop_gradients()
        return {"grad_norm": norm, "learning_rate": settings.learning_rate}

    def drop_gradients(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None

    def state(self, *, create: bool) -> dict[str, Tensor]:
        create = create or self._plain.begun or self._sharded.begun or self._moments.begun
        return {
            **self._plain.state(create=create),
            **self._sharded.state(create=create),
            **self._moments.state(create=create),
        }

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        others = self._moments.parameters
        return moment_shapes(others) | {
            f"{name}.momentum_buffer": tuple(each.shape)
            for name, each in self._parameters.items()
            if name not in others
        }

    def reset(self) -> None:
        self.drop_gradients()
        self._plain.reset()
        self._sharded.reset()
        self._moments.reset()


class PlainMuon:
    def __init__(self, matrices: Mapping[str, nn.Parameter]) -> None:
        self._matrices = dict(matrices)
        self._muon = _muon(list(self._matrices.values())) if self._matrices else None

    def step(self, settings: DiMuonSettings) -> None:
        if self._muon is None:
            return
        for group in self._muon.param_groups:
            group["lr"] = settings.learning_rate
            group["momentum"] = settings.beta1
        self._muon.step()

    @property
    def begun(self) -> bool:
        return self._muon is not None and any(self._muon.state.values())

    def state(self, *, create: bool) -> dict[str, Tensor]:
        if self._muon is None:
            return {}
        found: dict[str, Tensor] = {}
        for name, matrix in self._matrices.items():
            state = self._muon.state[matrix]
            if not state and create:
                state["momentum_buffer"] = torch.zeros_like(matrix.detach())
            if state:
                found[f"{name}.momentum_buffer"] = state["momentum_buffer"]
        return found

    def reset(self) -> None:
        if self._muon is not None:
            self._muon.state.clear()


class ShardedMuon:
    """Muon over sharded matrices.

    Momentum is sharded like the weights. Newton-Schulz needs whole matrices, so each rank of a
    replica gathers some of them, computes their update with torch's Muon and broadcasts it."""

    def __init__(self, matrices: Mapping[str, nn.Parameter]) -> None:
        self._matrices = dict(matrices)
        self._buffers: dict[str, Tensor] = {}

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, settings: DiMuonSettings) -> None:
        names = [name for name, matrix in self._matrices.items() if matrix.grad is not None]
        if not names:
            return
        replica = _Replica(self._matrices[names[0]].device_mesh)
        for start in range(0, len(names), replica.size):
            self._round(names[start : start + replica.size], replica, settings)

    def _round(self, names: Sequence[str], replica: _Replica, settings: DiMuonSettings) -> None:
        whole: Tensor | None = None
        for owner, name in enumerate(names):
            gathered = self._nesterov(name, settings.beta1).full_tensor()
            if owner == replica.index:
                whole = gathered
        mine = _orthogonal_update(whole, settings.learning_rate) if whole is not None else None
        for owner, name in enumerate(names):
            matrix = self._matrices[name]
            update = mine if owner == replica.index else None
            if update is None:
                update = torch.empty(matrix.shape, dtype=matrix.dtype, device=matrix.device)
            replica.broadcast(update, owner=owner)
            matrix.to_local().add_(_piece(update, matrix))

    def _nesterov(self, name: str, momentum: float) -> DTensor:
        """The sharded direction before orthogonalization, as torch's Muon defines it."""
        gradient = self._matrices[name].grad
        assert gradient is not None
        buffer = self._buffers.get(name)
        if buffer is None:
            buffer = self._buffers[name] = torch.zeros_like(gradient)
        buffer.lerp_(gradient, 1 - momentum)
        return gradient.lerp(buffer, momentum)

    @property
    def begun(self) -> bool:
        return bool(self._buffers)

    def state(self, *, create: bool) -> dict[str, Tensor]:
        for name, matrix in self._matrices.items():
            if create and name not in self._buffers:
                self._buffers[name] = torch.zeros_like(matrix.detach())
        return {f"{name}.momentum_buffer": each for name, each in self._buffers.items()}

    def reset(self) -> None:
        self._buffers.clear()


class _Replica:
    """The ranks of a mesh that hold one replica: all dimensions but `replicas`."""

    def __init__(self, mesh: DeviceMesh) -> None:
        names = mesh.mesh_dim_names or ("",) * mesh.ndim
        self._mesh = mesh
        self._dims = [dim for dim, name in enumerate(names) if name != "replicas"]
        self._here = [mesh.get_local_rank(dim) for dim in self._dims]
        self._sizes = [mesh.size(dim) for dim in self._dims]
        self.size = math.prod(self._sizes)
        self.index = int(np.ravel_multi_index(self._here, self._sizes))

    def broadcast(self, value: Tensor, *, owner: int) -> None:
        """Send the owner's value to all, first along the last dimension, then along each earlier
        one."""
        there = [int(each) for each in np.unravel_index(owner, self._sizes)]
        for depth in reversed(range(len(self._dims))):
            if self._sizes[depth] > 1 and self._here[:depth] == there[:depth]:
                group = self._mesh.get_group(self._dims[depth])
                source = dist.get_global_rank(group, there[depth])
                dist.broadcast(value, src=source, group=group)


def _muon(matrices: list[nn.Parameter], *, momentum: float = 0.9) -> torch.optim.Muon:
    return torch.optim.Muon(
        matrices,
        lr=0.0,
        weight_decay=0.0,
        momentum=momentum,
        nesterov=momentum > 0,
        adjust_lr_fn="match_rms_adamw",
    )


def _orthogonal_update(direction: Tensor, learning_rate: float) -> Tensor:
    """The update of torch's Muon: a step without momentum from a matrix of zeros."""
    update = nn.Parameter(torch.zeros_like(direction))
    update.grad = direction
    muon = _muon([update], momentum=0.0)
    muon.param_groups[0]["lr"] = learning_rate
    muon.step()
    return update.detach()


def _piece(whole: Tensor, like: DTensor) -> Tensor:
    shape, first = compute_local_shape_and_global_offset(
        like.shape, like.device_mesh, like.placements
    )
    return whole[tuple(slice(at, at + size) for at, size in zip(first, shape, strict=True))]
