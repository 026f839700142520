"""Tensor parallelism (Shoeybi et al., arXiv 1909.08053): a model's matrices divided among ranks
that compute the same tokens together.

Transformers' plan of a model (`tp_plan`) says which matrices are divided, and how. Each parameter
becomes a DTensor over those ranks, so FSDP, checkpoints and exporting know a rank's part. Modules
compute with their parts as plain tensors. Blocks can be compiled, because equal modules compute
alike and collectives are operators."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import (
    DeviceMesh,
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

from tandem.errors import WorkerStartFailed
from tandem.weights.model_config import undivided_heads
from trainer_service.models.huggingface import find_blocks

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

COLUMNS, ROWS, GATHERED, SPLIT, TABLE, OF_HEADS = (
    "colwise",
    "rowwise",
    "colwise_gather_output",
    "rowwise_split_input",
    "embedding_rowwise",
    "replicated_with_grad_allreduce",
)
"""Transformers' names of the styles. In a linear layer, a rank has some outputs, some inputs, some
outputs that are then gathered, or some inputs of a whole input. In an embedding it has some tokens.
The last style is whole and computes with one rank's heads."""
EXPERTS = "experts"
"""Unlike in transformers' plan, a rank has some of a layer's experts, whole."""
_OF_EXPERTS = "_is_expert_parallel"
"""An attribute of transformers' layers of experts: tokens of experts on other ranks are skipped."""
_TOLERANCE = 1e-4
_LAYERS: Mapping[str, type[nn.Module]] = {
    COLUMNS: nn.Linear,
    ROWS: nn.Linear,
    GATHERED: nn.Linear,
    SPLIT: nn.Linear,
    TABLE: nn.Embedding,
    OF_HEADS: nn.Module,
    EXPERTS: nn.Module,
}


def check_divisible(model: PreTrainedModel, count: int) -> None:
    """Raise `WorkerStartFailed` for a model that cannot be divided among `count` ranks."""
    if reason := _why_not(model, count):
        raise WorkerStartFailed(
            f"{type(model).__name__} cannot be divided among {count} ranks "
            f"(tandem.tensor_parallel): {reason}"
        )


def _why_not(model: PreTrainedModel, count: int) -> str:
    plan, styles = dict(model.tp_plan), _styles_of(model)
    if not styles:
        return "transformers has no plan for it"
    for name, parameter in model.named_parameters():
        if styles.get(name.rpartition(".")[0]) == EXPERTS:
            continue
        if parameter.ndim > 2:
            return f"{name} is of several experts, in a layer that trainers do not know"
        if any(model.get_submodule(name.rpartition(".")[0]).children()) or _general(name) in plan:
            return f"{name} is in no layer of its own"
    for name, style in styles.items():
        module = model.get_submodule(name)
        if (kind := _LAYERS.get(style)) is None:
            return f"its plan has {style}, of {name}, which trainers do not know"
        if not isinstance(module, kind):
            return f"{name} is a {type(module).__name__}, and {style} is not for that"
    if odd := undivided_heads(model.config.get_text_config().to_dict(), count):
        return odd
    placements: dict[nn.Parameter, Placement] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        module, _, key = name.rpartition(".")
        placement = _placement(styles.get(module, ""), key)
        if placements.setdefault(parameter, placement) != placement:
            return f"its plan divides {name} only once, and other layers have it, too"
        if isinstance(placement, Shard) and parameter.shape[placement.dim] % count:
            size = parameter.shape[placement.dim]
            rows = "experts" if styles[module] == EXPERTS else "rows"
            return f"{name} has {size} {rows if placement.dim == 0 else 'columns'}"
    return ""


def divide_matrices(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Divide a model without memory, after its blocks are compiled and before they are
    checkpointed."""
    group = mesh.get_group()
    ranks = _Ranks(count=mesh.size(), index=mesh.get_local_rank(), group=group.group_name)
    styles, made = _styles_of(model), dict[nn.Parameter, nn.Parameter]()
    for name, module in model.named_modules():
        own = {key: each for key, each in module._parameters.items() if each is not None}
        style = styles.get(name, "")
        for key, parameter in own.items():
            if parameter not in made:  # a tied weight stays one
                part = distribute_tensor(
                    parameter.detach(), mesh, [_placement(style, key)], src_data_rank=None
                )
                made[parameter] = nn.Parameter(part, requires_grad=parameter.requires_grad)
            module._parameters[key] = made[parameter]
        if own:
            # A class, not a forward function: otherwise compiled blocks would differ.
            module.__class__ = _class_of_part(type(module), style)  # type: ignore[arg-type]
            module.ranks = ranks
        if isinstance(module, _PartOfTable | _PartOfExperts):
            module.hold_part()
    _give_plain_parameters(model)


def compare_divided(whole: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Raise `WorkerStartFailed` unless a small model, divided, gives equal logits and gradients."""
    whole = whole.to(mesh.device_type)
    divided = copy.deepcopy(whole)
    divide_matrices(divided, mesh)
    tokens = torch.arange(1, 8, device=mesh.device_type)[None]
    found: list[dict[str, Tensor]] = []
    for model in (whole, divided):
        try:
            logits = model(input_ids=tokens, use_cache=False).logits
        except RuntimeError as error:  # a plan may omit a layer with a row for each head
            raise WorkerStartFailed(
                f"{type(whole).__name__} cannot be divided among {mesh.size()} ranks "
                f"(tandem.tensor_parallel): a small one fails with: {error}"
            ) from error
        (logits * torch.linspace(-1, 1, logits.shape[-1], device=logits.device)).sum().backward()
        named = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        found.append({"logits": logits.detach(), **named})
    for name, wanted in found[0].items():
        other = found[1][name]
        if isinstance(other, DTensor):
            other = other.full_tensor()
        tolerance = _TOLERANCE * max(1.0, float(wanted.abs().max()))
        if float((other - wanted).abs().max()) > tolerance:
            what = "its logits" if name == "logits" else f"the gradient of {name}"
            raise WorkerStartFailed(
                f"{type(whole).__name__} cannot be divided among {mesh.size()} ranks "
                f"(tandem.tensor_parallel): {what} would differ from those of the whole model"
            )


def shapes_on_a_rank(model: PreTrainedModel, count: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a model's parameters on each of `count` ranks that divide it."""
    styles, shapes = _styles_of(model) if count > 1 else {}, dict[str, tuple[int, ...]]()
    for name, parameter in model.named_parameters():
        module, _, key = name.rpartition(".")
        placement, shape = _placement(styles.get(module, ""), key), list(parameter.shape)
        if isinstance(placement, Shard):
            shape[placement.dim] //= count
        shapes[name] = tuple(shape)
    return shapes


@dataclass(frozen=True)
class _Ranks:
    """The number of ranks that compute together, this rank's index, and their group's name."""

    count: int
    index: int
    group: str

    def add_up(self, value: Tensor) -> Tensor:
        total: Tensor = torch.ops.tandem.add_up(value, self.group)
        return total

    def gather(self, value: Tensor) -> Tensor:
        """[..., n / count] → [..., n]."""
        parts: Tensor = torch.ops.tandem.gather_parts(value, self.count, self.group)
        return torch.cat(parts.unbind(), dim=-1)

    def part_of(self, value: Tensor, *, dim: int = -1) -> Tensor:
        """[..., n] → [..., n / count]."""
        return value.chunk(self.count, dim=dim)[self.index]


# --- Parameters -----------------------------------------------------------------------------------


def _styles_of(model: PreTrainedModel) -> dict[str, str]:
    plan = dict(model.tp_plan)
    found = {
        name: EXPERTS if hasattr(module, _OF_EXPERTS) else plan.get(_general(name), "")
        for name, module in model.named_modules()
    }
    return {name: style for name, style in found.items() if style}


def _general(name: str) -> str:
    """Example: `model.layers.3.mlp` is `model.layers.*.mlp`."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _placement(style: str, key: str) -> Placement:
    if style in (COLUMNS, GATHERED, TABLE, EXPERTS):
        return Shard(0)
    return Shard(1) if style in (ROWS, SPLIT) and key == "weight" else Replicate()


# --- Modules --------------------------------------------------------------------------------------


def _give_plain_parameters(model: nn.Module) -> None:
    """Let blocks, and modules outside blocks, compute with plain tensors."""
    units = {block: list(block.modules()) for block in find_blocks(model)}
    inside = {module for modules in units.values() for module in modules}
    units |= {module: [module] for module in model.modules() if module not in inside}
    for unit, modules in units.items():
        if parts := [module for module in modules if isinstance(module, _Part)]:
            unit.forward = functools.partial(_with_plain_parameters, parts, unit.forward)


def _with_plain_parameters(
    modules: Sequence[_Part], forward: Callable[..., Any], *given: Any, **named: Any
) -> Any:
    held = [dict(module._parameters) for module in modules]
    for module in modules:
        module.make_plain()
    try:
        return forward(*given, **named)
    finally:
        for module, parameters in zip(modules, held, strict=True):
            module._parameters.update(parameters)


class _Part(nn.Module):  # type: ignore[misc]  # torch is Any to mypy
    """A module that is whole on all ranks and computes alike on them."""

    ranks: _Ranks
    of_replicated: Placement = Replicate()
    """The placement of whole parameters' gradients: equal on all ranks, or parts of a sum
    (`Partial`)."""

    def make_plain(self) -> None:
        for key, each in self._parameters.items():
            if isinstance(each, DTensor):
                (placement,) = each.placements
                gradient = self.of_replicated if isinstance(placement, Replicate) else placement
                self._parameters[key] = each.to_local(grad_placements=[gradient])

    def part_of(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """This rank's parts of an adapter's A [r, in] and B [out, r]. The ranks' gradients add up
        to the whole layer's."""
        return _of_first(a, self.ranks), _of_first(b, self.ranks)


class _PartOfHeads(_Part):
    """Whole on all ranks. Each rank computes with its heads."""

    of_replicated = Partial()

    def part_of(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return a, b


class _PartInColumns(_Part):
    """Each rank has some of a linear layer's outputs."""

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = super().forward(_copy_to(x, self.ranks))
        return made

    def part_of(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return a, self.ranks.part_of(b, dim=0)


class _PartInGatheredColumns(_PartInColumns):
    def forward(self, x: Tensor) -> Tensor:
        return _gather(super().forward(x), self.ranks)


class _PartInRows(_Part):
    """Each rank has some of a linear layer's inputs."""

    _added: Tensor | None = None

    def make_plain(self) -> None:
        super().make_plain()
        # Otherwise every rank would add the bias.
        self.__dict__["_added"], self._parameters["bias"] = self._parameters["bias"], None

    def forward(self, x: Tensor) -> Tensor:
        total = _sum(super().forward(x), self.ranks)
        return total if self._added is None else total + self._added

    def part_of(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return self.ranks.part_of(a, dim=1), b


class _PartInSplitRows(_PartInRows):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(_split(x, self.ranks))


class _PartOfTable(_Part):
    """Each rank has the rows of some tokens."""

    num_embeddings: int
    padding_idx: int | None

    def hold_part(self) -> None:
        """Restrict the table to this rank's tokens. The padding token has no gradient."""
        self.num_embeddings //= self.ranks.count
        if self.padding_idx is not None:
            own = self.padding_idx - self.ranks.index * self.num_embeddings
            self.padding_idx = own if 0 <= own < self.num_embeddings else None

    def forward(self, tokens: Tensor) -> Tensor:
        """The rows [B, T, hidden] of tokens [B, T]."""
        own = tokens - self.ranks.index * self.num_embeddings
        elsewhere = (own < 0) | (own >= self.num_embeddings)
        found = super().forward(own.masked_fill(elsewhere, 0))
        return _sum(found.masked_fill(elsewhere[..., None], 0), self.ranks)


class _PartOfExperts(_Part):
    """Each rank has some of a layer's experts."""

    num_experts: int

    def hold_part(self) -> None:
        self.num_experts //= self.ranks.count
        setattr(self, _OF_EXPERTS, True)

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """The weighted sum of the `chosen` experts' outputs. `hidden` is [T, hidden], the others
        [T, k]."""
        own = chosen - self.ranks.index * self.num_experts
        elsewhere = (own < 0) | (own >= self.num_experts)
        found = super().forward(
            _copy_to(hidden, self.ranks),
            own.masked_fill(elsewhere, self.num_experts),
            _copy_to(weights, self.ranks),
        )
        return _sum(found, self.ranks)


_PARTS: Mapping[str, type[_Part]] = {
    "": _Part,
    COLUMNS: _PartInColumns,
    ROWS: _PartInRows,
    GATHERED: _PartInGatheredColumns,
    SPLIT: _PartInSplitRows,
    TABLE: _PartOfTable,
    OF_HEADS: _PartOfHeads,
    EXPERTS: _PartOfExperts,
}


@functools.cache
def _class_of_part(kind: type, style: str) -> type:
    return type(kind.__name__, (_PARTS[style], kind), {"__module__": kind.__module__})


# --- Collectives ----------------------------------------------------------------------------------


def _copy_to(value: Tensor, ranks: _Ranks) -> Tensor:
    """Use a common value in parts of a computation. Gradients are summed."""
    return _Copy.apply(value, ranks)


def _sum(value: Tensor, ranks: _Ranks) -> Tensor:
    return _Sum.apply(value, ranks)


def _gather(value: Tensor, ranks: _Ranks) -> Tensor:
    """The ranks' values, concatenated along the last dimension."""
    return _Gather.apply(value, ranks)


def _split(value: Tensor, ranks: _Ranks) -> Tensor:
    """This rank's slice, along the last dimension, of a common value."""
    return _Split.apply(value, ranks)


def _of_first(value: Tensor, ranks: _Ranks) -> Tensor:
    """A common value with which all ranks compute alike: rank 0 gets its gradient, the others
    zeros."""
    return _OfFirst.apply(value, ranks)


class _Copy(torch.autograd.Function):  # type: ignore[misc]  # torch is Any to mypy
    @staticmethod
    def forward(ctx: Any, value: Tensor, ranks: _Ranks) -> Tensor:
        ctx.ranks = ranks
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.ranks.add_up(gradient), None


class _Sum(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, value: Tensor, ranks: _Ranks) -> Tensor:
        return ranks.add_up(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Gather(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, value: Tensor, ranks: _Ranks) -> Tensor:
        ctx.ranks = ranks
        return ranks.gather(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.ranks.part_of(gradient).contiguous(), None


class _Split(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, value: Tensor, ranks: _Ranks) -> Tensor:
        ctx.ranks = ranks
        return ranks.part_of(value).contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.ranks.gather(gradient), None


class _OfFirst(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, value: Tensor, ranks: _Ranks) -> Tensor:
        ctx.ranks = ranks
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        # Zeros that depend on nothing would let a compiler drop earlier collectives.
        return gradient * float(ctx.ranks.index == 0), None


# --- Operators ------------------------------------------------------------------------------------

_OPERATORS = torch.library.Library("tandem", "FRAGMENT")
for _schema in (
    "add_up(Tensor value, str group) -> Tensor",
    "gather_parts(Tensor value, int count, str group) -> Tensor",
):
    _OPERATORS.define(_schema, tags=torch.Tag.needs_exact_strides)


def _add_up(value: Tensor, group: str) -> Tensor:
    total = value.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=_resolve_process_group(group))
    return total


def _gather_parts(value: Tensor, count: int, group: str) -> Tensor:
    """[count, *value.shape]."""
    parts = _shape_of_parts(value, count, group)
    group_of = _resolve_process_group(group)
    dist.all_gather([*parts.unbind()], value.contiguous(), group=group_of)
    return parts


def _shape_of_total(value: Tensor, group: str) -> Tensor:
    return torch.empty_like(value, memory_format=torch.contiguous_format)


def _shape_of_parts(value: Tensor, count: int, group: str) -> Tensor:
    return value.new_empty((count, *value.shape))


for _device in ("CPU", "CUDA"):
    _OPERATORS.impl("add_up", _add_up, _device)
    _OPERATORS.impl("gather_parts", _gather_parts, _device)
torch.library.register_fake("tandem::add_up", _shape_of_total, lib=_OPERATORS)
torch.library.register_fake("tandem::gather_parts", _shape_of_parts, lib=_OPERATORS)
