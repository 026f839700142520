"""Low-rank adapters (LoRA, Hu et al., arXiv 2106.09685): their layers, and their files as PEFT's.

A frozen linear layer W [out, in] gets A [r, in] and B [out, r], and computes
y = W x + b + alpha / r · B A x. A is drawn as PEFT does (uniform within ±1/√in) and B is zero, so
that a new adapter changes nothing.

Several runs can adapt one model. Its layers compute with the adapters of the run that is active,
and one that this run does not adapt is the plain layer.

On disk (huggingface/peft, docs: checkpoint format), `adapter_config.json` lies beside
`adapter_model.safetensors`, whose keys are `base_model.model.{module}.lora_A.weight` [r, in] and
`….lora_B.weight` [out, r].
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

from tandem.errors import InvalidRequest, UnsuitableLora, without_paths
from tandem.worker import LoraSpec
from trainer_service.models.huggingface import find_blocks

if TYPE_CHECKING:
    from torch import Tensor


_ATTENTION = frozenset(
    [
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "qkv_proj",
        "query_key_value",
        "query",
        "key",
        "value",
        "Wqkv",
        "c_attn",
        "W_pack",
        "q_a_proj",
        "q_b_proj",
        "kv_a_proj_with_mqa",
        "kv_b_proj",
    ]
)
_MLP = frozenset(
    [
        "gate_proj",
        "up_proj",
        "down_proj",
        "gate_up_proj",
        "dense_h_to_4h",
        "dense_4h_to_h",
        "fc1",
        "fc2",
        "fc_in",
        "fc_out",
        "c_fc",
        "w1",
        "w2",
        "w3",
    ]
)
_EITHER = frozenset({"dense", "out_proj", "c_proj"})
"""The last layer of an attention in some models, of an MLP in others."""


@dataclass(frozen=True, eq=False)
class Adapter:
    """One layer's A [r, in] and B [out, r], in float32, and alpha / r."""

    lora_A: nn.Parameter
    lora_B: nn.Parameter
    scale: float

    @classmethod
    def of(
        cls,
        layer: nn.Linear | LoraLinear,
        *,
        rank: int,
        scale: float,
        seed: int,
        device: torch.device | str = "cpu",
    ) -> Adapter:
        """Return a new one, drawn from the seed."""
        a = torch.empty(rank, layer.in_features, dtype=torch.float32)
        generator = torch.Generator().manual_seed(seed)
        nn.init.kaiming_uniform_(a, a=math.sqrt(5), generator=generator)
        b = torch.zeros(layer.out_features, rank, dtype=torch.float32)
        return cls(nn.Parameter(a.to(device)), nn.Parameter(b.to(device)), scale)


@dataclass
class ActiveAdapters:
    """The adapters that a model computes with, by module name: those of the run that the operation
    under way is of."""

    by_module: Mapping[str, Adapter] = field(default_factory=dict)


class LoraLinear(nn.Module):  # type: ignore[misc]  # torch is Any to mypy
    """A linear layer with the frozen parameters of another and the active adapter, if there is one.

    The parameters keep their names, and a tied weight stays tied: the adapter is added to the
    layer's output. Adapters are no part of the module: they come and go with their runs.
    """

    def __init__(self, layer: nn.Linear, *, name: str, active: ActiveAdapters) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight = layer.weight
        self.register_parameter("bias", layer.bias)
        self.name = name
        self._active = active

    def forward(self, x: Tensor) -> Tensor:
        """[…, in] → […, out]."""
        y = functional.linear(x, self.weight, self.bias)
        adapter = self._active.by_module.get(self.name)
        if adapter is None:
            return y
        a, b = adapter.lora_A, adapter.lora_B
        if a.dtype != y.dtype:
            a, b = a.to(y.dtype), b.to(y.dtype)
        low = functional.linear(x, a)
        added = torch.addmm(y.flatten(0, -2), low.flatten(0, -2), b.t(), alpha=adapter.scale)
        return added.view_as(y)


def merged(weight: Tensor, *, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """W + scale · B A in float32, [out, in]."""
    return torch.addmm(weight.float(), b.float(), a.float(), alpha=scale)


def chosen_layers(model: nn.Module, spec: LoraSpec) -> dict[str, nn.Linear | LoraLinear]:
    """The layers that `spec` selects, by module name, in the model's order.

    Attention and MLP layers are those of the transformer blocks; mixture-of-experts layers
    only if each expert consists of plain linear layers. Raises `UnsuitableLora` if there are
    none, or if the rank is too large for one of them.
    """
    chosen = dict(_matching(model, spec))
    if not chosen:
        wanted = [name for name in ("attention", "mlp", "unembedding") if getattr(spec, name)]
        raise UnsuitableLora(
            f"the model has no linear layer for LoRA on {' and '.join(wanted)}; choose others"
            if wanted
            else "a LoRA run must train attention, mlp or unembedding, and all three are off"
        )
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


def _matching(model: nn.Module, spec: LoraSpec) -> Iterator[tuple[str, nn.Linear | LoraLinear]]:
    names = {module: name for name, module in model.named_modules()}
    blocks = tuple(f"{names[block]}." for block in find_blocks(model))
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear | LoraLinear):
            continue
        if module is head:
            wanted = spec.unembedding
        elif name.startswith(blocks):
            kind = _kind(name)
            wanted = (kind == "attention" and spec.attention) or (kind == "mlp" and spec.mlp)
        else:
            wanted = False
        if wanted:
            yield name, module


def kinds_without_layers(model: nn.Module, spec: LoraSpec) -> list[str]:
    """The kinds that `spec` selects but the model has no linear layers for, such as the MLP of a
    model whose experts are fused into one tensor."""
    off = {"attention": False, "mlp": False, "unembedding": False}
    return [
        kind
        for kind in off
        if getattr(spec, kind)
        and not any(_matching(model, spec.model_copy(update={**off, kind: True})))
    ]


def _kind(name: str) -> str:
    parent, _, leaf = name.rpartition(".")
    if leaf in _EITHER:
        return "attention" if "att" in parent.rpartition(".")[2].lower() else "mlp"
    return "attention" if leaf in _ATTENTION else "mlp" if leaf in _MLP else ""


def freeze(model: nn.Module, active: ActiveAdapters) -> None:
    """Freezes the model, and lets every layer that can have an adapter compute with the active
    one."""
    model.requires_grad_(False)
    for name, layer in list(_matching(model, LoraSpec())):
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, LoraLinear(layer, name=name, active=active))


def new_adapters(
    model: nn.Module, spec: LoraSpec, *, device: torch.device | str
) -> dict[str, Adapter]:
    """Returns new adapters for the selected layers, by module name. Raises `UnsuitableLora`.

    Each A is drawn from the seed and the layer's name alone.
    """
    return {
        name: Adapter.of(
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

    PEFT selects a module whose name is one of these or ends with "." and one of them. The last
    parts of the names suffice, unless they select other modules too; then the whole names do.
    """
    leaves = sorted({name.rpartition(".")[2] for name in chosen})
    meant = {name for name in all_modules if name.rpartition(".")[2] in leaves}
    return leaves if meant == set(chosen) else sorted(chosen)


CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
_PREFIX = "base_model.model."


def key_of(module: str, *, side: str) -> str:
    """The key of a module's A or B: `key_of("lm_head", side="A")` is
    `"base_model.model.lm_head.lora_A.weight"`."""
    return f"{_PREFIX}{module}.lora_{side}.weight"


def modules_of(keys: Sequence[str], *, where: str) -> list[str]:
    """The modules that have both A and B, sorted. Raises `InvalidRequest` for any other key."""
    modules = sorted(
        {
            key.removeprefix(_PREFIX).removesuffix(".lora_A.weight").removesuffix(".lora_B.weight")
            for key in keys
        }
    )
    wanted = {key_of(module, side=side) for module in modules for side in "AB"}
    if odd := sorted(wanted ^ set(keys)):
        raise InvalidRequest(f"{where} is not a LoRA adapter of linear layers: see {odd[0]}")
    return modules


@dataclass(frozen=True)
class AdapterConfig:
    """The contents of `adapter_config.json`; `targets` are PEFT's `target_modules`."""

    base_model: str
    rank: int
    alpha: float
    targets: Sequence[str]

    def write(self, directory: Path) -> Path:
        """Writes every setting of PEFT's, so that none of its defaults matters."""
        path = directory / CONFIG_NAME
        whole = int(self.alpha) if self.alpha == int(self.alpha) else self.alpha
        path.write_text(
            json.dumps(
                {
                    "peft_type": "LORA",
                    "task_type": "CAUSAL_LM",
                    "base_model_name_or_path": self.base_model,
                    "r": self.rank,
                    "lora_alpha": whole,
                    "target_modules": list(self.targets),
                    "lora_dropout": 0.0,
                    "bias": "none",
                    "fan_in_fan_out": False,
                    "inference_mode": True,
                    "init_lora_weights": True,
                    "modules_to_save": None,
                    "use_rslora": False,
                    "use_dora": False,
                    "rank_pattern": {},
                    "alpha_pattern": {},
                },
                indent=1,
            )
        )
        return path


def read_scale(directory: Path) -> float:
    """Returns alpha / r of an adapter. Raises `InvalidRequest` unless it is plain LoRA with one
    rank and one alpha."""
    try:
        config = json.loads((directory / CONFIG_NAME).read_text())
        rank, alpha = int(config["r"]), float(config["lora_alpha"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = without_paths(str(error))
        raise InvalidRequest(f"{directory.name} has no readable {CONFIG_NAME}: {why}") from error
    plain = config.get("peft_type") == "LORA" and config.get("bias", "none") == "none"
    others = ("use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "fan_in_fan_out")
    if not plain or any(config.get(name) for name in (*others, "modules_to_save")) or rank < 1:
        raise InvalidRequest(f"{directory.name} is not a plain LoRA adapter; see {CONFIG_NAME}")
    return alpha / rank
