"""Compute a checked graph on the tensors of one datum, within limits. Needs torch.

torch.fx has an interpreter too. It calls methods by name on whatever a node returned, and knows
no bounds, so that it would save nothing here.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tandem.custom_losses.graph import Argument, DType, Graph, Node, Ref
from tandem.custom_losses.implementations import (
    DTYPES,
    FUNCTIONS,
    METHODS,
    Implementation,
    is_view,
    item,
    without_masks,
)
from tandem.custom_losses.operations import FACTORIES, INSPECTIONS, SIZE_KEEPING
from tandem.errors import CustomLossFailed, describe

_SMALL = 2**18
"""Elements below which an operation that keeps sizes is computed at once: to compute its size
beforehand would take ten times as long."""
_INTERMEDIATE = 4
"""Tensors that such an operation makes on its way, for each element of its result."""


@dataclass(frozen=True)
class Limits:
    """`elements` of one tensor, `total` of all tensors that a datum's graph makes, and the
    `seconds` that a request's graphs may take on one rank."""

    elements: int = 2**24
    total: int = 2**26
    seconds: float = 30.0


@dataclass(frozen=True)
class Result:
    """`loss`: a finite scalar tensor, with a graph for autograd if the logprobs had one."""

    loss: Tensor
    metrics: Mapping[str, float]


class Interpreter:
    """Computes one graph, for the datums of one request."""

    def __init__(self, graph: Graph, limits: Limits) -> None:
        self._graph = graph
        self._limits = limits
        self._seconds = 0.0  # over all datums
        self._sizes: dict[tuple[int, str], int] = {}
        self._functions: list[Implementation] = []
        for node in graph.nodes[len(graph.inputs) :]:
            table = FUNCTIONS if node.kind == "function" else METHODS
            self._functions.append(table[node.target])

    def run(self, inputs: Sequence[Tensor]) -> Result:
        """Compute the graph. `inputs` are in the order of the graph's.

        Raises `CustomLossFailed`, which names the node and the operation.
        """
        began = time.perf_counter()
        try:
            values = self._values(inputs, deadline=began + self._limits.seconds - self._seconds)
        finally:
            self._seconds += time.perf_counter() - began
        loss = values[self._graph.loss.node]
        if not isinstance(loss, Tensor) or not loss.is_floating_point():
            raise self.failed("it must return its loss as a tensor of floats")
        if loss.ndim:
            raise self.failed(f"it must return a scalar loss, not one of shape {list(loss.shape)}")
        if not _is_finite(loss):
            nodes = zip(self._graph.nodes, values, strict=True)
            first = next(node for node, value in nodes if not _is_finite(value))
            raise self.failed(
                f"its loss is {loss.item()}; the first value that is not finite comes from {first}"
            )
        metrics = {
            name: self._number(name, values[ref.node]) for name, ref in self._graph.metrics.items()
        }
        return Result(loss=loss, metrics=metrics)

    def failed(self, sentence: str) -> CustomLossFailed:
        return CustomLossFailed(f"the custom loss {self._graph.name!r} failed: {sentence}")

    def _values(self, inputs: Sequence[Tensor], *, deadline: float) -> list[object]:
        """Return the value of every node."""
        values: list[object] = list(inputs)
        total = 0
        calls = self._graph.nodes[len(inputs) :]
        for node, function in zip(calls, self._functions, strict=True):
            if time.perf_counter() > deadline:
                raise self.failed(
                    f"it took more than {self._limits.seconds:g} s on the request's datums"
                )
            try:
                value, elements = self._call(node, function, values)
            except Exception as error:  # torch and Python raise any kind for wrong arguments
                sentence = describe(error, typed=True).splitlines()[0]
                raise self.failed(f"{node}: {sentence}"[:600]) from error
            values.append(value)
            total += elements
            if total > self._limits.total:
                raise self.failed(
                    f"{node}: its tensors have more than {self._limits.total} elements "
                    "together for one datum"
                )
        return values

    def _call(
        self, node: Node, function: Implementation, values: Sequence[object]
    ) -> tuple[object, int]:
        """Return the value of a node, and how many elements it allocated."""
        args = [_resolve(each, values) for each in node.args]
        keywords = {
            key: _resolve(each, values)
            for key, each in node.kwargs.items()
            if key not in ("device", "layout", "memory_format")
        }
        tensors = list(_tensors((*args, *keywords.values())))
        if node.target in FACTORIES:
            assert isinstance(values[0], Tensor)
            keywords["device"] = values[0].device
        elif node.target in INSPECTIONS or not tensors:
            return function(*args, **keywords), 0
        elif node.target in SIZE_KEEPING and _broadcast_size(tensors) <= _SMALL:
            value = function(*args, **keywords)
            return value, _INTERMEDIATE * sum(each.numel() for each in _tensors([value]))
        sized, its_args = function, args
        if node.target == "operator.getitem":
            if is_view(args[1]):
                return item(*args), 0
            its_args = [args[0], without_masks(args[1])]
        elif node.target in ("torch.masked_select", "masked_select"):
            sized = torch.broadcast_tensors
        elements = self._elements(len(values), sized, its_args, keywords)
        return function(*args, **keywords), elements

    def _elements(
        self,
        number: int,
        function: Implementation,
        args: Sequence[object],
        keywords: Mapping[str, object],
    ) -> int:
        """Return how many elements a call allocates, by running it on tensors without content.

        `number` is the node's. Raises `ValueError` for a tensor that is too large, or whatever
        torch raises for shapes that do not fit.
        """
        key = (number, repr(_replace_tensors([*args, *keywords.items()], _describe)))
        if key not in self._sizes:
            hollow = [_replace_tensors(each, _hollow) for each in args]
            options = {name: _replace_tensors(each, _hollow) for name, each in keywords.items()}
            if "device" in options:
                options["device"] = torch.device("meta")
            with torch.no_grad(), _Allocations(self._limits.elements) as made:
                function(*hollow, **options)
            self._sizes[key] = made.elements
        return self._sizes[key]

    def _number(self, name: str, value: object) -> float:
        if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
            return float(value.detach().item())
        if isinstance(value, int | float):
            return float(value)
        shape = f" of shape {list(value.shape)}" if isinstance(value, Tensor) else ""
        raise self.failed(
            f"the metric {name!r} must be a scalar tensor, not a {type(value).__name__}{shape}"
        )


class _Allocations(TorchDispatchMode):  # type: ignore[misc]
    """Adds up the elements of every tensor made inside, intermediate results included.

    Raises `ValueError` at the first one of more than `limit` elements.
    """

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.elements = 0
        self._limit = limit

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors([result]):
            elements = math.prod(tensor.shape)
            if elements > self._limit:
                raise ValueError(
                    f"it would make a tensor of {elements} elements (shape "
                    f"{list(tensor.shape)}); {self._limit} are allowed"
                )
            self.elements += elements
        return result


def _resolve(argument: Argument, values: Sequence[object]) -> object:
    """Return an argument with the values of the nodes that it refers to."""
    match argument:
        case Ref(node=index):
            return values[index]
        case DType(name=name):
            return DTYPES[name]
        case tuple():
            return tuple(_resolve(each, values) for each in argument)
        case list():
            return [_resolve(each, values) for each in argument]
        case slice():
            bounds = [_resolve(b, values) for b in (argument.start, argument.stop, argument.step)]
            for bound in bounds:
                if not (bound is None or isinstance(bound, int)):
                    raise TypeError(f"a slice takes whole numbers, not {type(bound).__name__}")
            return slice(*bounds)
        case _:
            return argument


def _broadcast_size(tensors: Sequence[Tensor]) -> int:
    """Return at most how many elements the tensors have when they are broadcast together."""
    return math.prod(max(1, math.prod(shape)) for shape in {each.shape for each in tensors})


def _tensors(values: Iterable[object]) -> Iterator[Tensor]:
    """Yield the tensors among values, and in tuples and lists of them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from _tensors(value)


def _replace_tensors(value: object, replace: Callable[[Tensor], object]) -> object:
    if isinstance(value, Tensor):
        return replace(value)
    if isinstance(value, tuple):
        return tuple(_replace_tensors(each, replace) for each in value)
    if isinstance(value, list):
        return [_replace_tensors(each, replace) for each in value]
    return value


def _describe(tensor: Tensor) -> object:
    return tensor.shape, tensor.dtype


def _hollow(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _is_finite(value: object) -> bool:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return True
    return bool(torch.isfinite(value).all())
