"""Computes a checked graph on the tensors of one datum.

Every operation comes from the table, is asked first how much it would make, and runs within the
limits of the request. Nothing of a client's is executed: its nodes choose among our functions.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tandem.custom_loss.graph import Argument, DType, Graph, Items, Node, Place, Ref, Slice
from tandem.errors import CustomLossFailed
from trainer_service.losses.custom import tensors
from trainer_service.losses.custom.sizing import (
    broadcast_bound,
    elements_made,
    elements_of,
    signature,
)
from trainer_service.losses.custom.table import (
    DTYPES,
    FACTORIES,
    FUNCTIONS,
    LOOKS,
    METHODS,
    NOT_GROWING,
)

if TYPE_CHECKING:
    from trainer_service.losses.custom.table import Implementation

_SMALL = 2**18
_INTERMEDIATE = 4
"""Tensors that an operation makes on its way, for each element of its result."""


@dataclass(frozen=True)
class Limits:
    """`elements` of one tensor, `total` of all tensors that a datum's graph makes, and the
    `seconds` that a request's graphs may take on one rank."""

    elements: int = 2**24
    total: int = 2**26
    seconds: float = 30.0


@dataclass(frozen=True)
class Result:
    """`loss` is a scalar tensor, ready for autograd if the logprobs were."""

    loss: Tensor
    metrics: Mapping[str, float]


class Interpreter:
    """One graph, for the datums of one request. `spent` counts the seconds over all of them."""

    def __init__(self, graph: Graph, limits: Limits) -> None:
        self.graph = graph
        self.spent = 0.0
        self._limits = limits
        self._made: dict[object, int] = {}
        self._functions = [_implementation(node) for node in graph.nodes]

    def run(self, inputs: Sequence[Tensor]) -> Result:
        """`inputs` in the order of the graph's, the first being the logprobs.

        Raises `CustomLossFailed`, which names the node and the operation.
        """
        values = self._compute(inputs)
        loss = values[self.graph.loss.node]
        if not isinstance(loss, Tensor) or not loss.is_floating_point():
            raise self._failed("it must return its loss as a tensor of floats")
        if loss.ndim:
            raise self._failed(f"it must return a scalar loss, not one of shape {list(loss.shape)}")
        metrics = {
            name: self._number(name, values[ref.node]) for name, ref in self.graph.metrics.items()
        }
        return Result(loss=loss, metrics=metrics)

    def first_not_finite(self, inputs: Sequence[Tensor]) -> str:
        """The first operation whose result has a NaN or an infinity, for a sentence."""
        with torch.no_grad():
            values = self._compute(inputs)
        for node, value in zip(self.graph.nodes, values, strict=True):
            if (
                isinstance(value, Tensor)
                and value.is_floating_point()
                and not bool(torch.isfinite(value).all())
            ):
                return str(node)
        return ""

    def _compute(self, inputs: Sequence[Tensor]) -> list[object]:
        values: list[object] = list(inputs)
        total = 0
        began = time.perf_counter()
        device = inputs[0].device
        try:
            for place in range(len(inputs), len(self.graph.nodes)):
                node, function = self.graph.nodes[place], self._functions[place]
                assert function is not None
                if self.spent + time.perf_counter() - began > self._limits.seconds:
                    raise self._failed(
                        f"it took more than {self._limits.seconds:g} s on the request's datums"
                    )
                try:
                    value, made = self._call(place, node, function, values, device)
                except Exception as error:  # torch and Python raise any kind for wrong arguments
                    sentence = f"{type(error).__name__}: {error}".splitlines()[0]
                    raise self._failed(f"{node}: {sentence}"[:600]) from error
                total += made
                if total > self._limits.total:
                    raise self._failed(
                        f"{node}: its tensors have more than {self._limits.total} elements "
                        "together for one datum"
                    )
                values.append(value)
        finally:
            self.spent += time.perf_counter() - began
        return values

    def _call(
        self,
        place: int,
        node: Node,
        function: Implementation,
        values: Sequence[object],
        device: torch.device,
    ) -> tuple[object, int]:
        """What a node gives, and how many elements it made."""
        args = [_resolve(each, values) for each in node.args]
        keywords = {
            key: _resolve(each, values)
            for key, each in (node.kwargs or {}).items()
            if key not in ("device", "layout", "memory_format")
        }
        makes = node.target in FACTORIES
        if makes:
            keywords["device"] = device
        if node.target in LOOKS or not (makes or _has_tensor(args, keywords)):
            return function(*args, **keywords), 0
        if node.target == "operator.getitem":
            if _is_view(args[1]):
                return function(*args), 0
            tensors.check_masks(args[0], args[1])
            args = [args[0], tensors.explicit_index(args[1])]
        elif node.target in ("torch.masked_select", "masked_select"):
            tensor, mask = torch.broadcast_tensors(args[0], args[1])
            function, args, keywords = tensors.item, [tensor, tensors.explicit_index(mask)], {}
        elif node.target in NOT_GROWING:
            bound = broadcast_bound((*args, *keywords.values()))
            if bound <= _SMALL:
                # Asking first would take ten times as long as computing it.
                result = function(*args, **keywords)
                return result, _INTERMEDIATE * elements_of(result)
        key = (place, signature(args), signature(list(keywords.items())))
        made = self._made.get(key)
        if made is None:
            made = elements_made(function, args, keywords, limit=self._limits.elements)
            self._made[key] = made
        return function(*args, **keywords), made

    def _number(self, name: str, value: object) -> float:
        if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
            return float(value.detach().item())
        if isinstance(value, int | float):
            return float(value)
        shape = f" of shape {list(value.shape)}" if isinstance(value, Tensor) else ""
        raise self._failed(
            f"the metric {name!r} must be a scalar tensor, not a {type(value).__name__}{shape}"
        )

    def _failed(self, sentence: str) -> CustomLossFailed:
        return CustomLossFailed(f"the custom loss {self.graph.name!r} failed: {sentence}")


def _implementation(node: Node) -> Implementation | None:
    match node.kind:
        case "input":
            return None
        case "function":
            return FUNCTIONS[node.target]
        case "method":
            return METHODS[node.target]


def _resolve(argument: Argument, values: Sequence[object]) -> object:
    match argument:
        case Ref(node=place):
            return values[place]
        case Items(items=items, is_tuple=is_tuple):
            found = [_resolve(each, values) for each in items]
            return tuple(found) if is_tuple else found
        case Slice(start=start, stop=stop, step=step):
            return slice(*(_bound(_resolve(each, values)) for each in (start, stop, step)))
        case DType(name=name):
            return DTYPES[name]
        case Place():
            return None
        case _:
            return argument


def _bound(value: object) -> object:
    if value is None or isinstance(value, int):
        return value
    raise TypeError(f"a slice takes whole numbers, not {type(value).__name__}")


def _has_tensor(args: Sequence[object], keywords: Mapping[str, object]) -> bool:
    return any(_contains(each) for each in (*args, *keywords.values()))


def _is_view(index: object) -> bool:
    """Whether an index takes a stretch of what is there, and makes nothing."""
    entries = index if isinstance(index, tuple) else (index,)
    return all(each is None or each is ... or isinstance(each, int | slice) for each in entries)


def _contains(value: object) -> bool:
    if isinstance(value, tuple | list):
        return any(_contains(each) for each in value)
    return isinstance(value, Tensor)
