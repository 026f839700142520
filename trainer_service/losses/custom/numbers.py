"""Python's own arithmetic in a custom loss, on numbers that come from shapes.

The same nodes compute on tensors, where torch bounds the work; Python's integers and texts have
no bounds of their own, and a power of a power would keep the process busy for ever.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

_LARGEST = 2**63
_LONGEST = 256


def arithmetic(name: str, function: Callable[..., object]) -> Callable[..., object]:
    """`operator.NAME` for tensors and numbers; `add` also joins two tuples, such as shapes."""

    def compute(*values: object) -> object:
        if any(isinstance(value, torch.Tensor) for value in values):
            for value in values:
                if not isinstance(value, torch.Tensor | bool | int | float):
                    raise TypeError(f"{name} takes tensors and numbers, not {_kind(value)}")
            return function(*values)
        if name == "add" and all(isinstance(value, tuple) for value in values):
            first, second = values
            assert isinstance(first, tuple)
            assert isinstance(second, tuple)
            if len(first) + len(second) > _LONGEST:
                raise ValueError(f"a tuple has more than {_LONGEST} entries")
            return (*first, *second)
        return _bounded(name, function, values)

    return compute


def of_numbers(name: str, function: Callable[..., object]) -> Callable[..., object]:
    """`math.NAME`, which would take a tensor of one element out of the gradient unnoticed."""

    def compute(*values: object) -> object:
        if any(isinstance(value, torch.Tensor) for value in values):
            raise TypeError(f"math.{name} takes numbers; for tensors there is torch.{name}")
        return _bounded(name, function, values)

    return compute


def _bounded(name: str, function: Callable[..., object], values: tuple[object, ...]) -> object:
    for value in values:
        if not isinstance(value, bool | int | float):
            raise TypeError(f"{name} takes tensors and numbers, not {_kind(value)}")
    if name == "pow":
        _check_power(*values)
    result = function(*values)
    if isinstance(result, int) and not -_LARGEST <= result < _LARGEST:
        raise OverflowError("an integer does not fit into 64 bits")
    if isinstance(result, complex):
        raise ValueError("a number is complex")
    return result


def _check_power(base: object, exponent: object, *_more: object) -> None:
    if not (isinstance(base, int) and isinstance(exponent, int)) or exponent <= 0:
        return
    if (base.bit_length() - 1) * exponent > 64:
        raise OverflowError("an integer does not fit into 64 bits")


def _kind(value: object) -> str:
    return type(value).__name__
