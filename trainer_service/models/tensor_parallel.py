"""Tensor parallelism (Shoeybi et al., arXiv 1909.08053): the matrices of a model divided among
ranks that compute the same tokens together.

Which are divided, and how, is the plan that transformers has of a model (`tp_plan`). Each parameter
becomes a DTensor over the mesh of those ranks, divided or whole, so that FSDP shards what a rank
has of it, and loading, checkpoints and exporting know what that is. Modules compute with their part
as a plain tensor; what they add up, gather or split is one of the operations below.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
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
from tandem.model_config import undivided_heads

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
"""Transformers' names of what a layer does: of a linear layer, each rank has some outputs, or some
inputs, or some outputs that are then gathered, or some inputs where all are there; of an embedding
some tokens. The last one is whole, and computes with the heads of one rank alone, as norms of
queries and keys do."""
PartOfAdapter = Callable[["Tensor", "Tensor"], tuple["Tensor", "Tensor"]]
"""What a rank computes with of A [r, in] and B [out, r], which each has whole: the gradients that
ranks have of them add up to those of the whole layer."""
_TOLERANCE = 1e-4
_LAYERS: Mapping[str, type[nn.Module]] = {
    COLUMNS: nn.Linear,
    ROWS: nn.Linear,
    GATHERED: nn.Linear,
    SPLIT: nn.Linear,
    TABLE: nn.Embedding,
    OF_HEADS: nn.Module,
}


def check_divisible(model: PreTrainedModel, count: int) -> None:
    """Raise `WorkerStartFailed` for a model that cannot be divided among `count` ranks, with what
    cannot."""
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
        if parameter.ndim > 2:
            return f"{name} is of several experts, which trainers do not divide"
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
            return f"{name} has {size} {'rows' if placement.dim == 0 else 'columns'}"
    return ""


def divide_matrices(model: PreTrainedModel, mesh: DeviceMesh) -> dict[str, PartOfAdapter]:
    """Divides a model that has no memory yet among the ranks of a mesh with one dimension. Returns
    what layers compute with of adapters, by module name."""
    ranks = _Ranks(count=mesh.size(), index=mesh.get_local_rank(), group=mesh.get_group())

    def part(parameter: nn.Parameter, placement: Placement) -> nn.Parameter:
        made = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
        return nn.Parameter(made, requires_grad=parameter.requires_grad)

    return _divide(model, ranks, part)


def compare_divided(whole: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Raise `WorkerStartFailed` unless a small model, divided, computes what it computes whole, and
    gives its parameters the same gradients: a plan may not name all that computes with some heads.
    """
    whole = whole.to(mesh.device_type)
    divided = copy.deepcopy(whole)
    divide_matrices(divided, mesh)
    tokens = torch.arange(1, 8, device=mesh.device_type)[None]
    found: list[dict[str, Tensor]] = []
    for model in (whole, divided):
        logits = model(input_ids=tokens, use_cache=False).logits
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


def divide_stand_in(model: PreTrainedModel, count: int) -> dict[str, PartOfAdapter]:
    """Gives a model on `meta` the sizes that it has on each of `count` ranks. Returns as
    `divide_matrices`."""

    def part(parameter: nn.Parameter, placement: Placement) -> nn.Parameter:
        own = parameter.detach()
        if isinstance(placement, Shard):
            own = own.chunk(count, dim=placement.dim)[0].clone()
        return nn.Parameter(own, requires_grad=parameter.requires_grad)

    return _divide(model, _Ranks(count=count, index=0, group=None), part)


class _Ranks:
    """Those that compute together, and which of them this is. Without a group, there is one that
    computes what all would, in shapes alone."""

    def __init__(self, *, count: int, index: int, group: dist.ProcessGroup | None) -> None:
        self.count, self.index, self.group = count, index, group

    def add_up(self, value: Tensor) -> Tensor:
        total = value.clone(memory_format=torch.contiguous_format)
        if self.group is not None:
            dist.all_reduce(total, group=self.group)
        return total

    def gather(self, value: Tensor) -> Tensor:
        """[…, n / count] → […, n]."""
        mine = value.contiguous()
        parts = [torch.empty_like(mine) for _ in range(self.count)]
        if self.group is not None:
            dist.all_gather(parts, mine, group=self.group)
        return torch.cat(parts, dim=-1)

    def part_of(self, value: Tensor) -> Tensor:
        """[…, n] → […, n / count]."""
        return value.chunk(self.count, dim=-1)[self.index].contiguous()


# --- Parameters -----------------------------------------------------------------------------------


def _styles_of(model: PreTrainedModel) -> dict[str, str]:
    """What the plan says of modules, by their names in the model."""
    plan = dict(model.tp_plan)
    found = {name: plan.get(_general(name), "") for name, _ in model.named_modules()}
    return {name: style for name, style in found.items() if style}


def _general(name: str) -> str:
    """Literal example: `model.layers.3.mlp` is `model.layers.*.mlp`."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _placement(style: str, key: str) -> Placement:
    """Where a module's parameter is: divided along one of its dimensions, or whole on each rank."""
    if style in (COLUMNS, GATHERED, TABLE):
        return Shard(0)
    return Shard(1) if style in (ROWS, SPLIT) and key == "weight" else Replicate()


def _divide(
    model: PreTrainedModel,
    ranks: _Ranks,
    part: Callable[[nn.Parameter, Placement], nn.Parameter],
) -> dict[str, PartOfAdapter]:
    styles, made = _styles_of(model), dict[nn.Parameter, nn.Parameter]()
    parts: dict[str, PartOfAdapter] = {}
    for name, module in list(model.named_modules()):
        own = {key: each for key, each in module._parameters.items() if each is not None}
        style = styles.get(name, "")
        for key, parameter in own.items():
            if parameter not in made:  # a tied weight stays one
                made[parameter] = part(parameter, _placement(style, key))
            module._parameters[key] = made[parameter]
        if style == TABLE:
            _hold_part_of_table(module, ranks)
        if own:
            _compute_with_part(module, style, ranks)
            parts[name] = partial(_part_of_adapter, style=style, ranks=ranks)
    return parts


# --- Modules --------------------------------------------------------------------------------------


def _compute_with_part(module: nn.Module, style: str, ranks: _Ranks) -> None:
    whole = module.forward
    grads: Placement = Partial() if style == OF_HEADS else Replicate()

    def forward(*given: Any, **named: Any) -> Any:
        with _plain_parameters(module, of_replicated=grads) as plain:
            if style in (COLUMNS, GATHERED):
                made = whole(_copy_to(given[0], ranks), *given[1:], **named)
                return _gather(made, ranks) if style == GATHERED else made
            if style in (ROWS, SPLIT):
                own = _split(given[0], ranks) if style == SPLIT else given[0]
                # Every rank would add it.
                bias, module._parameters["bias"] = plain.get("bias"), None
                total = _sum(whole(own, *given[1:], **named), ranks)
                return total if bias is None else total + bias
            if style == TABLE:
                return _look_up(whole, given[0], module, ranks)
            return whole(*given, **named)

    module.forward = forward


def _part_of_adapter(a: Tensor, b: Tensor, *, style: str, ranks: _Ranks) -> tuple[Tensor, Tensor]:
    """The A [r, in] and B [out, r] that a rank has, whole, as it computes with them: for its
    outputs, or its inputs, or all where all ranks compute the same."""
    if style in (COLUMNS, GATHERED):
        return a, b.chunk(ranks.count)[ranks.index]
    if style in (ROWS, SPLIT):
        return a.chunk(ranks.count, dim=1)[ranks.index], b
    return (a, b) if style == OF_HEADS else (_of_first(a, ranks), _of_first(b, ranks))


@contextmanager
def _plain_parameters(
    module: nn.Module, *, of_replicated: Placement
) -> Iterator[Mapping[str, Tensor]]:
    """Lets a module compute with what this rank has of its parameters. The gradients of those that
    are whole are alike on all ranks (`Replicate`), or parts of a sum (`Partial`)."""
    held = {key: each for key, each in module._parameters.items() if each is not None}
    plain = {key: _plain(each, of_replicated) for key, each in held.items()}
    module._parameters.update(plain)
    try:
        yield plain
    finally:
        module._parameters.update(held)


def _plain(parameter: Tensor, of_replicated: Placement) -> Tensor:
    if not isinstance(parameter, DTensor):
        return parameter
    (placement,) = parameter.placements
    gradient = of_replicated if isinstance(placement, Replicate) else placement
    return parameter.to_local(grad_placements=[gradient])


def _hold_part_of_table(module: nn.Module, ranks: _Ranks) -> None:
    """Of the table's tokens, the padding has no gradient."""
    rows = module.num_embeddings // ranks.count
    module.num_embeddings = rows
    if module.padding_idx is not None:
        own = module.padding_idx - ranks.index * rows
        module.padding_idx = own if 0 <= own < rows else None


def _look_up(
    whole: Callable[[Tensor], Tensor], tokens: Tensor, module: nn.Module, ranks: _Ranks
) -> Tensor:
    """The rows [B, T, hidden] of tokens, of which each rank has some."""
    own = tokens - ranks.index * module.num_embeddings
    elsewhere = (own < 0) | (own >= module.num_embeddings)
    found = whole(own.masked_fill(elsewhere, 0))
    return _sum(found.masked_fill(elsewhere[..., None], 0), ranks)


# --- What ranks tell each other -------------------------------------------------------------------


def _copy_to(value: Tensor, ranks: _Ranks) -> Tensor:
    """What all have, for parts of a computation: gradients are sums."""
    return _Copy.apply(value, ranks)


def _sum(value: Tensor, ranks: _Ranks) -> Tensor:
    """The sum of what each has."""
    return _Sum.apply(value, ranks)


def _gather(value: Tensor, ranks: _Ranks) -> Tensor:
    """What each has, side by side."""
    return _Gather.apply(value, ranks)


def _split(value: Tensor, ranks: _Ranks) -> Tensor:
    """Of what all have, what is this rank's, side by side."""
    return _Split.apply(value, ranks)


def _of_first(value: Tensor, ranks: _Ranks) -> Tensor:
    """What all have and compute the same with: the first has its gradient, and others zeros. None
    is without one, which backward passes of all would have to know."""
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
        return ctx.ranks.part_of(gradient), None


class _Split(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, value: Tensor, ranks: _Ranks) -> Tensor:
        ctx.ranks = ranks
        return ranks.part_of(value)

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
        return gradient if ctx.ranks.index == 0 else torch.zeros_like(gradient), None
