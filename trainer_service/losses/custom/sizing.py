"""How large the results of an operation are, before any memory is taken for them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class TooLarge(ValueError):
    pass


class SizeWatch(TorchDispatchMode):  # type: ignore[misc]
    """Adds up the elements of everything that is made inside, intermediate results included.

    Raises `TooLarge` at the first tensor of more than `limit` elements.
    """

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit
        self.elements = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                elements = math.prod(tensor.shape)
                if elements > self.limit:
                    raise TooLarge(
                        f"it would make a tensor of {elements} elements (shape "
                        f"{list(tensor.shape)}); {self.limit} are allowed"
                    )
                self.elements += elements
        return result


def elements_made(
    function: Callable[..., object],
    args: Sequence[object],
    keywords: dict[str, object],
    *,
    limit: int,
) -> int:
    """Runs a function on tensors without content ("meta") and says how many elements it makes.

    Raises `TooLarge`, or whatever torch raises for shapes that do not fit.
    """
    with torch.no_grad(), SizeWatch(limit) as watch:
        function(*(_hollow(arg) for arg in args), **{k: _hollow(v) for k, v in keywords.items()})
    return int(watch.elements)


def broadcast_bound(args: Iterable[object]) -> int:
    """At most how many elements the tensors among the arguments have when they are broadcast."""
    shapes: set[tuple[int, ...]] = set()
    _collect_shapes(args, shapes)
    return math.prod(max(1, math.prod(shape)) for shape in shapes)


def elements_of(result: object) -> int:
    if isinstance(result, Tensor):
        return int(result.numel())
    if isinstance(result, tuple | list):
        return sum(elements_of(each) for each in result)
    return 0


def _collect_shapes(values: Iterable[object], found: set[tuple[int, ...]]) -> None:
    for value in values:
        if isinstance(value, Tensor):
            found.add(tuple(value.shape))
        elif isinstance(value, tuple | list):
            _collect_shapes(value, found)


def _hollow(value: object) -> object:
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    if isinstance(value, torch.device):
        return torch.device("meta")
    if isinstance(value, tuple) and not isinstance(value, torch.Size):
        return tuple(_hollow(each) for each in value)
    if isinstance(value, list):
        return [_hollow(each) for each in value]
    return value


def signature(value: object) -> object:
    """What the sizes of a result depend on: shapes, dtypes and numbers, hashable."""
    if isinstance(value, Tensor):
        return (value.shape, value.dtype)
    if isinstance(value, tuple | list):
        return (type(value).__name__, tuple(signature(each) for each in value))
    if isinstance(value, slice):
        return ("slice", value.start, value.stop, value.step)
    if isinstance(value, float) and math.isnan(value):
        return "nan"
    return (type(value).__name__, value)
