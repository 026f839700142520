"""What each allowed operation is. Nothing here is looked up by a client's string: the names are
those of `tandem/custom_loss/names.py`, and a node finds its function in these tables or nowhere.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
import torch.nn.functional as functional

from tandem.custom_loss import names
from trainer_service.losses.custom import numbers, tensors

Implementation = Callable[..., object]


def _functions() -> dict[str, Implementation]:
    found: dict[str, Implementation] = {"getattr": tensors.attribute}
    for name in names.TORCH:
        found[f"torch.{name}"] = getattr(torch, name)
    for name in names.FUNCTIONAL:
        found[f"torch.nn.functional.{name}"] = getattr(functional, name)
    for name in names.SPECIAL:
        found[f"torch.special.{name}"] = getattr(torch.special, name)
    for name in names.LINALG:
        found[f"torch.linalg.{name}"] = getattr(torch.linalg, name)
    for name in names.OPERATORS:
        found[f"operator.{name}"] = numbers.arithmetic(name, getattr(operator, name))
    for name in names.MATH:
        found[f"math.{name}"] = numbers.of_numbers(name, getattr(math, name))
    found["operator.getitem"] = tensors.item
    found["torch.masked_select"] = tensors.masked_select
    found["torch.numel"] = tensors.numel
    return found


def _methods() -> dict[str, Implementation]:
    found: dict[str, Implementation] = {name: getattr(torch.Tensor, name) for name in names.METHODS}
    found["masked_select"] = tensors.masked_select
    found["to"] = tensors.to
    found["type"] = tensors.to
    found["cpu"] = tensors.stay
    for name in ("numel", "nelement"):
        found[name] = tensors.numel
    return found


FUNCTIONS: Mapping[str, Implementation] = MappingProxyType(_functions())
METHODS: Mapping[str, Implementation] = MappingProxyType(_methods())

FACTORIES = frozenset(
    f"torch.{name}" for name in ("arange", "eye", "full", "linspace", "ones", "zeros")
)
"""Functions that make a tensor from nothing, and are told on which device."""

LOOKS = frozenset(
    {"getattr", "torch.numel", "torch.is_floating_point"}
    | {"numel", "nelement", "size", "dim", "ndimension", "is_floating_point", "cpu"}
)
"""Operations that look at a tensor and make none."""

NOT_GROWING = frozenset(
    names.NOT_GROWING
    | {f"torch.{name}" for name in names.NOT_GROWING}
    | {f"torch.special.{name}" for name in names.SPECIAL}
    | {f"operator.{name}" for name in names.OPERATORS - {"getitem", "matmul"}}
    | {f"torch.nn.functional.{name}" for name in names.FUNCTIONAL - {"one_hot", "pad"}}
)
"""Operations whose tensors, intermediate ones included, are of the size of their arguments."""

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {name: getattr(torch, name) for name in names.DTYPES}
)
