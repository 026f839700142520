"""The layers of low-rank adapters (LoRA, Hu et al., arXiv 2106.09685).

A frozen linear layer W [out, in] gets A [r, in] and B [out, r], and computes y = W x + b + alpha /
r · B A x. A is drawn as in PEFT (uniform within ±1/√in) and B is zero, so a new adapter changes
nothing. Several runs can adapt one model. Its layers compute with the active run's adapters, or in
a joint pass with each run's own for its rows.

`tandem.weights.adapter_files` has their files in PEFT's format."""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

from tandem.errors import UnsuitableLora
from tandem.protocol.worker import LORA_FLAGS, LoraSpec
from trainer_service.models.huggingface import find_blocks

if TYPE_CHECKING:
    from torch import Tensor


_KINDS = tuple(LORA_FLAGS)
_CHOOSERS = ("gate", "router")
"""Name suffixes of modules that choose experts. They stay frozen, as in PEFT."""


@dataclass(frozen=True, eq=False)
class Adapter:
    """One layer's A [r, in] and B [out, r], in float32, and alpha / r."""

    lora_A: nn.Parameter
    lora_B: nn.Parameter
    scale: float

    @classmethod
    def of_layer(
        cls,
        layer: nn.Linear | LoraLinear,
        *,
        rank: int,
        scale: float,
        seed: int,
        device: torch.device | str = "cpu",
    ) -> Adapter:
        a = torch.empty(rank, layer.in_features, dtype=torch.float32)
        generator = torch.Generator().manual_seed(seed)
        nn.init.kaiming_uniform_(a, a=math.sqrt(5), generator=generator)
        b = torch.zeros(layer.out_features, rank, dtype=torch.float32)
        return cls(nn.Parameter(a.to(device)), nn.Parameter(b.to(device)), scale)


@dataclass(frozen=True)
class RunRows:
    """The neighbouring rows of one run in a joint pass, and the run's adapters by module name."""

    rows: int
    by_module: Mapping[str, Adapter]


class ActiveAdapters:
    """The adapters of the current operation's run, by module name.

    In a joint pass, each computing thread has its own list of `RunRows` instead."""

    def __init__(self) -> None:
        self.by_module: Mapping[str, Adapter] = {}
        self.layers: list[LoraLinear] = []
        self._of_thread = threading.local()

    def activate(self, adapters: Mapping[str, Adapter]) -> None:
        """Set each layer's adapter. Compiled code does not depend on adapter names."""
        if adapters is not self.by_module:
            self.by_module = adapters
            for layer in self.layers:
                layer.adapter = adapters.get(layer.name)

    @contextmanager
    def joint_pass(self) -> Iterator[None]:
        """Within the block, threads compute with the adapters of `of_rows`."""
        for layer in self.layers:
            layer.joint = True
        try:
            yield
        finally:
            for layer in self.layers:
                layer.joint = False

    @contextmanager
    def of_rows(self, runs: Sequence[RunRows]) -> Iterator[None]:
        """Within the block, this thread computes rows of these runs, in their order."""
        self._of_thread.runs = runs
        try:
            yield
        finally:
            self._of_thread.runs = ()

    @property
    def runs_of_rows(self) -> Sequence[RunRows]:
        """This thread's runs in a joint pass. Otherwise none."""
        found: Sequence[RunRows] = getattr(self._of_thread, "runs", ())
        return found


class LoraLinear(nn.Module):  # type: ignore[misc]  # torch is Any to mypy
    """A linear layer with the frozen parameters of another, plus the active adapter, if any.

    The adapter is added to the layer's output, so a tied weight stays tied."""

    def __init__(self, layer: nn.Linear, *, name: str, active: ActiveAdapters) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight = layer.weight
        self.register_parameter("bias", layer.bias)
        self.name = name
        self.adapter: Adapter | None = None
        self.joint = False  # compiled code never sees a joint pass
        self._active = active
        active.layers.append(self)

    def forward(self, x: Tensor) -> Tensor:
        """[…, in] → […, out]."""
        y = functional.linear(x, self.weight, self.bias)
        if self.joint:
            return self._add_each(x.flatten(0, -2), y.flatten(0, -2)).view_as(y)
        adapter = self.adapter
        if adapter is None:
            return y
        return self._add(adapter, x.flatten(0, -2), y.flatten(0, -2)).view_as(y)

    def _add(self, adapter: Adapter, x: Tensor, y: Tensor) -> Tensor:
        """y [n, out] + scale · B A x, for x [n, in]."""
        a, b = self.part_of(adapter.lora_A, adapter.lora_B)
        if a.dtype != y.dtype:
            a, b = a.to(y.dtype), b.to(y.dtype)
        return torch.addmm(y, functional.linear(x, a), b.t(), alpha=adapter.scale)

    def _add_each(self, x: Tensor, y: Tensor) -> Tensor:
        """As `_add`, each run's rows with its own adapter. `split` makes one gradient of all."""
        runs = self._active.runs_of_rows
        sizes = [run.rows for run in runs] if len(runs) > 1 else [len(x)]  # perhaps a chunk
        parts = []
        for run, mine, out in zip(runs, x.split(sizes), y.split(sizes), strict=True):
            adapter = run.by_module.get(self.name)
            parts.append(out if adapter is None else self._add(adapter, mine, out))
        return torch.cat(parts)

    def part_of(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """The parts of A and B for this rank: all, unless ranks divide the layer's matrix."""
        return a, b


def merged(weight: Tensor, *, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """W + scale · B A in float32, [out, in]."""
    return torch.addmm(weight.float(), b.float(), a.float(), alpha=scale)


def chosen_layers(model: nn.Module, spec: LoraSpec) -> dict[str, nn.Linear | LoraLinear]:
    """The layers that `spec` selects, by module name, in the model's order.

    Raises `UnsuitableLora` if a selected kind has no linear layer, or has weights outside linear
    layers (fused experts, GPT-2's convolutions), or if the rank is too large for a layer."""
    selected = [kind for kind in _KINDS if getattr(spec, kind)]
    if not selected:
        raise UnsuitableLora(
            "a LoRA run must train attention, mlp or unembedding, and all three are off"
        )
    kinds, others = _layers(model), _other_weights(model)
    suits = [kind for kind in _KINDS if kind in kinds.values() and kind not in others.values()]
    for kind in selected:
        if passed := [name for name, of in others.items() if of == kind]:
            raise UnsuitableLora(
                f"LoRA on {kind} would miss {_some(passed)}: adapters need linear layers, and "
                f"these are none. {_instead(selected, suits)}"
            )
        if kind not in suits:
            raise UnsuitableLora(
                f"the model has no linear layer for LoRA on {kind}. {_instead(selected, suits)}"
            )
    chosen = {name: model.get_submodule(name) for name, kind in kinds.items() if kind in selected}
    for name, layer in chosen.items():
        most = min(layer.in_features, layer.out_features)
        if spec.rank > most:
            limits = [min(one.in_features, one.out_features) for one in chosen.values()]
            raise UnsuitableLora(
                f"LoRA rank {spec.rank} is too large: {name} is "
                f"[{layer.out_features}, {layer.in_features}]; the largest rank for this choice "
                f"of layers is {min(limits)}"
            )
    return chosen


def _instead(selected: Sequence[str], suits: Sequence[str]) -> str:
    off = ", ".join(f"{LORA_FLAGS[kind]}=False" for kind in selected if kind not in suits)
    left, full = [kind for kind in selected if kind in suits], "train all parameters (NAME:full)"
    if not left:
        others = " or ".join(f"{LORA_FLAGS[kind]}=True" for kind in suits)
        return f"Pass {off} and {others}, or {full}" if others else full.capitalize()
    return f"Pass {off}, or {full}"


def _some(names: Sequence[str]) -> str:
    more = len(names) - 1
    return f"{names[0]} and {more} more weights" if more else names[0]


def _layers(model: nn.Module) -> dict[str, str]:
    """The kind of each adaptable linear layer, by name, in the model's order."""
    head, inside = model.get_output_embeddings(), _names_in_blocks(model)
    kinds: dict[str, str] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | LoraLinear):
            kind = "unembedding" if module is head else _kind(inside.get(name, ""))
            if kind:
                kinds[name] = kind
    return kinds


def _other_weights(model: nn.Module) -> dict[str, str]:
    """The kind of each matrix in a block outside linear layers and norms, which may be matrices
    (Cohere)."""
    kinds: dict[str, str] = {}
    for name, inside in _names_in_blocks(model).items():
        module = model.get_submodule(name)
        if isinstance(module, nn.Linear | LoraLinear) or type(module).__name__.endswith("Norm"):
            continue
        if kind := _kind(inside):
            for leaf, parameter in module.named_parameters(recurse=False):
                if parameter.dim() > 1:
                    kinds[f"{name}.{leaf}"] = kind
    return kinds


def _names_in_blocks(model: nn.Module) -> dict[str, str]:
    names = {module: name for name, module in model.named_modules()}
    return {
        f"{names[block]}.{inside}": inside
        for block in find_blocks(model)
        for inside, _ in block.named_modules()
        if inside
    }


def _kind(inside: str) -> str:
    """The kind of a module by its name in its block, or ""."""
    if not inside or any(part.endswith(_CHOOSERS) for part in inside.split(".")):
        return ""
    return "attention" if "attn" in inside or "attention" in inside else "mlp"


def chooses_experts(model: nn.Module) -> bool:
    """True if layers of the model compute only chosen rows."""
    names = (name for name, _ in model.named_modules())
    return any(part.endswith(_CHOOSERS) for name in names for part in name.split("."))


def freeze(model: nn.Module, active: ActiveAdapters) -> None:
    model.requires_grad_(False)
    for name in _layers(model):
        parent, _, leaf = name.rpartition(".")
        layer = LoraLinear(model.get_submodule(name), name=name, active=active)
        setattr(model.get_submodule(parent), leaf, layer)


def new_adapters(
    model: nn.Module, spec: LoraSpec, *, device: torch.device | str
) -> dict[str, Adapter]:
    """Return new adapters for the selected layers, by module name. Raises `UnsuitableLora`.

    Each A depends only on the seed and the layer's name."""
    return {
        name: Adapter.of_layer(
            layer,
            rank=spec.rank,
            scale=spec.alpha / spec.rank,
            seed=_seed_of(name, seed=spec.seed),
            device=device,
        )
        for name, layer in chosen_layers(model, spec).items()
    }


def _seed_of(name: str, *, seed: int) -> int:
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1  # torch takes 63 bits


def target_names(chosen: list[str], *, all_modules: list[str]) -> list[str]:
    """PEFT's `target_modules` that select exactly the chosen modules.

    PEFT selects a module if its name equals a target or ends with "." and a target. Whole names are
    used only if the last parts would also select other modules."""
    leaves = sorted({name.rpartition(".")[2] for name in chosen})
    meant = {name for name in all_modules if name.rpartition(".")[2] in leaves}
    return leaves if meant == set(chosen) else sorted(chosen)
