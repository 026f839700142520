"""The function behind each operation of a custom loss.

A node finds it only in `FUNCTIONS` or `METHODS`. No string of a client is looked up in a module or
on an object."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

import torch
import torch.nn.functional
from torch import Tensor

from tandem.custom_losses import operations

Implementation = Callable[..., object]

_LONGEST_TUPLE = 256
_TENSOR_ATTRIBUTES: Mapping[str, Callable[[Tensor], object]] = MappingProxyType(
    {name: operator.attrgetter(name) for name in operations.ATTRIBUTES - {"values", "indices"}}
)
_PAIR_ATTRIBUTES: Mapping[str, int] = MappingProxyType({"values": 0, "indices": 1})


def attribute(owner: object, name: object) -> object:
    """Return one of `operations.ATTRIBUTES`."""
    if isinstance(owner, Tensor) and isinstance(name, str) and name in _TENSOR_ATTRIBUTES:
        return _TENSOR_ATTRIBUTES[name](owner)
    if isinstance(owner, tuple) and isinstance(name, str) and name in _PAIR_ATTRIBUTES:
        # max, min, sort, topk and similar functions return a tuple of values and indices.
        return owner[_PAIR_ATTRIBUTES[name]]
    raise TypeError(f"a {type(owner).__name__} has no attribute {name!r} here")


def item(owner: object, index: object) -> object:
    """Return `owner[index]` of a tensor, or of a tuple such as a shape."""
    if isinstance(owner, Tensor):
        return owner[index]
    if isinstance(owner, tuple | list) and isinstance(index, int | slice):
        return owner[index]
    raise TypeError(f"{type(owner).__name__}[{type(index).__name__}] is not allowed")


def convert(tensor: Tensor, *wanted: object, **keywords: object) -> Tensor:
    """Convert to another dtype, or another tensor's. The device stays."""
    for value in (*wanted, keywords.get("dtype"), keywords.get("other")):
        if isinstance(value, torch.dtype):
            return tensor.to(value)
        if isinstance(value, Tensor):
            return tensor.to(value.dtype)
    return tensor


def arithmetic(function: Implementation, *values: object) -> object:
    """Compute a function of `operator` on tensors and numbers, or join two tuples (`add`).

    Integers are bounded, because a power of a power would run for ever."""
    if function is operator.add and all(isinstance(value, tuple) for value in values):
        joined = function(*values)
        assert isinstance(joined, tuple)
        if len(joined) > _LONGEST_TUPLE:
            raise ValueError(f"a tuple has more than {_LONGEST_TUPLE} entries")
        return joined
    for value in values:
        if not isinstance(value, Tensor | bool | int | float):
            name = getattr(function, "__name__", "")
            raise TypeError(f"{name} takes tensors and numbers, not {type(value).__name__}")
    if any(isinstance(value, Tensor) for value in values):
        return function(*values)
    if function is operator.pow:
        _check_power(*values)
    result = function(*values)
    if isinstance(result, int) and not -(2**63) <= result < 2**63:
        raise OverflowError("an integer does not fit into 64 bits")
    if isinstance(result, complex):
        raise ValueError("a number is complex")
    return result


def number(function: Implementation, *values: object) -> object:
    """Compute a function of `math` on numbers. A tensor would silently lose its gradient."""
    if any(isinstance(value, Tensor) for value in values):
        name = getattr(function, "__name__", "")
        raise TypeError(f"math.{name} takes numbers; for tensors there is torch.{name}")
    return arithmetic(function, *values)


def _check_power(base: object, exponent: object) -> None:
    if not (isinstance(base, int) and isinstance(exponent, int)) or exponent <= 0:
        return
    if (base.bit_length() - 1) * exponent > 64:
        raise OverflowError("an integer does not fit into 64 bits")


def _functions() -> dict[str, Implementation]:
    modules = {
        "torch": torch,
        "torch.nn.functional": torch.nn.functional,
        "torch.special": torch.special,
        "torch.linalg": torch.linalg,
        "operator": operator,
        "math": math,
    }
    found: dict[str, Implementation] = {"getattr": attribute}
    for module, names in operations.MODULES.items():
        for name in names:
            function = getattr(modules[module], name)
            if module == "operator":
                function = partial(arithmetic, function)
            elif module == "math":
                function = partial(number, function)
            found[f"{module}.{name}"] = function
    found["operator.getitem"] = item
    return found


FUNCTIONS: Mapping[str, Implementation] = MappingProxyType(_functions())
METHODS: Mapping[str, Implementation] = MappingProxyType(
    {name: getattr(Tensor, name) for name in operations.METHODS}
    | {"to": convert, "type": convert, "cpu": convert}
)
DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {name: getattr(torch, name) for name in operations.DTYPES}
)
