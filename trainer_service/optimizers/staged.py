"""AdamW over states in bfloat16 or on the host, one piece at a time.

torch's fused AdamW needs weights, gradients and moments in float32 on one device. Other states are
copied there, stepped and copied back.

Rounding to bfloat16 is stochastic, with the probabilities that keep the mean. Rounding to nearest
would lose every update of a weight below 2^-9 of it, and every decay of the second moment. An
element's random bits are a hash of the step, the tensor's kind and the element's position, so a
restored run draws equal bits, on any number of ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim.adamw import adamw

from tandem.errors import OutOfMemory
from trainer_service.optimizers.base import AdamWSettings, local

if TYPE_CHECKING:
    from torch import Tensor

PIECE = 2**22
"""Elements stepped together: at most 16 MiB for each of up to four tensors, and 64 MiB for random
bits."""


@dataclass(frozen=True)
class Positions:
    """Positions of elements among all parameters: rows of `width`, the first at `first`, `stride`
    apart."""

    first: int
    width: int = 1
    stride: int = 1

    def between(self, start: int, end: int, *, device: torch.device) -> Tensor:
        """Positions of the elements from `start` to `end`, int64 [end - start], modulo 2^32."""
        found = torch.arange(start, end, device=device)
        if self.width != self.stride:
            rows = found.div(self.width, rounding_mode="floor")
            found += rows.mul_(self.stride - self.width)
        return found.add_(self.first % 2**32)


@dataclass
class _Kept:
    """The state of one parameter, of this rank's part. `step` is on the host."""

    parameter: nn.Parameter
    positions: Positions
    step: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor


@dataclass(frozen=True)
class _Slice:
    """A flat range of elements of one parameter, its moments and its gradient."""

    kept: _Kept
    start: int
    end: int

    def slice_of(self, tensor: Tensor) -> Tensor:
        return local(tensor).reshape(-1)[self.start : self.end]


class StagedMoments:
    """`Moments`, computed on `device` wherever the parameters are.

    With `on_host` the moments are in pinned host memory."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        *,
        device: str = "cpu",
        on_host: bool,
        piece: int = PIECE,
    ) -> None:
        self.parameters = dict(parameters)
        self._device = torch.device(device)
        self._on_host = on_host
        self._piece = piece
        self._kept: dict[str, _Kept] = {}
        self.begun = False

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, settings: AdamWSettings) -> None:
        self._create()
        stepped = [each for each in self._kept.values() if each.parameter.grad is not None]
        number = int(max((each.step for each in self._kept.values()), default=torch.zeros(())))
        for piece in _pieces(stepped, self._piece):
            _step(piece, settings, device=self._device, number=number)
        for each in stepped:
            each.step += 1
        if self._on_host and torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()  # others read the host's memory

    def drop_gradients(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    def state(self, *, create: bool) -> dict[str, Tensor]:
        if create:
            self._create()
        found: dict[str, Tensor] = {}
        for name, kept in self._kept.items() if self.begun else ():
            found[f"{name}.step"] = kept.step
            found[f"{name}.exp_avg"] = _sharded_as(kept.parameter, kept.exp_avg)
            found[f"{name}.exp_avg_sq"] = _sharded_as(kept.parameter, kept.exp_avg_sq)
        return found

    def reset(self) -> None:
        """Keep pinned memory allocated."""
        self.begun = False

    def _create(self) -> None:
        if self.begun:
            return
        self.begun, first = True, 0
        for name, parameter in self.parameters.items():
            if (kept := self._kept.get(name)) is None:
                self._kept[name] = _Kept(
                    parameter=parameter,
                    positions=_positions(parameter, first),
                    step=torch.zeros((), dtype=torch.float32),
                    exp_avg=self._zeros(parameter),
                    exp_avg_sq=self._zeros(parameter),
                )
            else:
                for tensor in (kept.step, kept.exp_avg, kept.exp_avg_sq):
                    tensor.zero_()
            first += parameter.numel()

    def _zeros(self, parameter: nn.Parameter) -> Tensor:
        mine = local(parameter.detach())
        device = torch.device("cpu") if self._on_host else self._device
        zeros = torch.zeros(mine.shape, dtype=mine.dtype, device=device)
        if device != self._device:
            pin(zeros)
        return zeros


def _pieces(kept: Sequence[_Kept], most: int) -> Iterator[list[_Slice]]:
    piece: list[_Slice] = []
    free = most
    for each in kept:
        size, start = each.exp_avg.numel(), 0
        while start < size:
            end = min(size, start + free)
            piece.append(_Slice(each, start, end))
            free -= end - start
            start = end
            if not free:
                yield piece
                piece, free = [], most
    if piece:
        yield piece


def _step(
    piece: Sequence[_Slice], settings: AdamWSettings, *, device: torch.device, number: int
) -> None:
    """`number`: optimizer steps before this one."""
    weights = [each.slice_of(each.kept.parameter) for each in piece]
    gradients = [each.slice_of(_gradient(each.kept.parameter)) for each in piece]
    averages = [each.slice_of(each.kept.exp_avg) for each in piece]
    squares = [each.slice_of(each.kept.exp_avg_sq) for each in piece]
    steps = torch.stack([each.kept.step for each in piece]).to(device)
    staged = [_staged(each, device) for each in (weights, gradients, averages, squares)]
    adamw(
        *staged,
        [],
        list(steps.unbind()),
        fused=True,
        amsgrad=False,
        beta1=settings.beta1,
        beta2=settings.beta2,
        lr=settings.learning_rate,
        weight_decay=settings.weight_decay,
        eps=settings.eps,
        maximize=False,
    )
    stepped = [staged[0], staged[2], staged[3]]
    for tensor, (homes, values) in enumerate(
        zip((weights, averages, squares), stepped, strict=True)
    ):
        if homes[0].dtype == torch.bfloat16:
            key = _mixed(3 * number + tensor)
            for each, value in zip(piece, values, strict=True):
                round_(value, each.kept.positions, start=each.start, key=key)
        if homes is not values:
            torch._foreach_copy_(homes, values, non_blocking=True)


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _staged(tensors: list[Tensor], device: torch.device) -> list[Tensor]:
    """The tensors in float32 on the device, copied only if needed."""
    if tensors[0].dtype == torch.float32 and tensors[0].device.type == device.type:
        return tensors
    sizes = [len(each) for each in tensors]
    copies = list(torch.empty(sum(sizes), dtype=torch.float32, device=device).split(sizes))
    torch._foreach_copy_(copies, tensors, non_blocking=True)
    return copies


# --- Rounding -----------------------------------------------------------------------------------


def round_(values: Tensor, positions: Positions, *, start: int, key: int) -> None:
    """Round `values`, float32 [n], to bfloat16 in place, stochastically and without bias.

    `start` is the number of the first of the `positions`. A bfloat16 is the upper half of a
    float32. Random bits added to the lower half carry into the upper half with the right
    probability."""
    bits = values.view(torch.int32)
    bits += random_bits(positions, start, start + len(values), key=key, device=values.device)
    bits &= -0x10000


def random_bits(
    positions: Positions, start: int, end: int, *, key: int, device: torch.device
) -> Tensor:
    """Sixteen random bits per position, int32 [end - start].

    The hash is "lowbias32" (C. Wellons, nullprogram.com/blog/2018/07/31)."""
    x = positions.between(start, end, device=device).add_(key).to(torch.int32)
    x ^= (x >> 16) & 0xFFFF
    x *= 0x7FEB352D
    x ^= (x >> 15) & 0x1FFFF
    x *= 0x846CA68B - 2**32
    x ^= (x >> 16) & 0xFFFF
    return x.bitwise_and_(0xFFFF)


def _mixed(number: int) -> int:
    """32 random-looking bits from a small number (the finalizer of SplitMix64)."""
    z = (number + 1) * 0x9E3779B97F4A7C15 % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return (z ^ (z >> 31)) % 2**32


# --- Layout -------------------------------------------------------------------------------------


def _positions(parameter: nn.Parameter, first: int) -> Positions:
    """Positions of this rank's part, a range of rows and perhaps columns. The first element is at
    `first`."""
    if not isinstance(parameter, DTensor):
        return Positions(first)
    shape, (row, *column) = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    stride, width = math.prod(parameter.shape[1:]), math.prod(shape[1:])
    assert stride == width or len(shape) == 2, f"{parameter.placements} is not by rows and columns"
    return Positions(first + row * stride + sum(column), width=width, stride=stride)


def _sharded_as(parameter: nn.Parameter, part: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor):
        return part
    return DTensor(part, parameter._spec, requires_grad=False)


def pin(tensor: Tensor) -> None:
    """Pin host memory in place. torch's own pinned memory is rounded up to a power of two.

    Raises `OutOfMemory`."""
    if not tensor.numel():
        return
    size = tensor.numel() * tensor.element_size()
    failed = int(torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), size, 0))
    if failed:
        raise OutOfMemory(
            f"{size} bytes of host memory for states cannot be pinned (CUDA error {failed})"
        )


def unpin(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)
