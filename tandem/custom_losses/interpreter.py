"""Computes a checked graph on the tensors of one datum. Needs torch.

torch.fx's interpreter calls methods by name on any returned object, so it would save nothing here.
This one checks its `deadline` between operations. `process` bounds memory and time."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.custom_losses.graph import Argument, DType, Graph, Node, Ref
from tandem.custom_losses.implementations import DTYPES, FUNCTIONS, METHODS, Implementation
from tandem.errors import CustomLossFailed, describe

_NO_MEMORY = ("not enough memory", "can't allocate memory", "bad_alloc", "bad alloc")
"""Parts of torch's messages when the system refuses memory."""


@dataclass(frozen=True)
class LossValue:
    """`loss` is finite. `gradient`, if requested, is its derivative by the logprobs."""

    loss: float
    gradient: Tensor | None
    metrics: Mapping[str, float]


class Interpreter:
    """Computes one graph. `deadline` limits this process's processor time, in seconds."""

    def __init__(self, graph: Graph, *, deadline: float) -> None:
        self._graph = graph
        self._deadline = deadline
        self._functions: list[Implementation] = []
        for node in graph.nodes[len(graph.inputs) :]:
            table = FUNCTIONS if node.kind == "function" else METHODS
            self._functions.append(table[node.target])

    def compute_graph(self, inputs: Sequence[Tensor], *, gradient: bool) -> LossValue:
        """Compute the graph and, if requested, its `gradient`. `inputs` are in the graph's order.

        Raises `CustomLossFailed`, which names the node and the operation."""
        leaf = inputs[0].requires_grad_(gradient)
        with torch.set_grad_enabled(gradient):
            values = self._values([leaf, *inputs[1:]])
            loss = values[self._graph.loss.node]
            if not isinstance(loss, Tensor) or not loss.is_floating_point():
                raise self.failed("it must return its loss as a tensor of floats")
            if loss.ndim:
                shape = list(loss.shape)
                raise self.failed(f"it must return a scalar loss, not one of shape {shape}")
            if not _is_finite(loss):
                nodes = zip(self._graph.nodes, values, strict=True)
                first = next(node for node, value in nodes if not _is_finite(value))
                raise self.failed(
                    f"its loss is {loss.item()}; the first value that is not finite comes from "
                    f"{first}"
                )
            metrics = {
                name: self._number(name, values[ref.node])
                for name, ref in self._graph.metrics.items()
            }
            found = self._gradient(loss.double(), leaf) if gradient else None
        return LossValue(loss=float(loss.double().item()), gradient=found, metrics=metrics)

    def failed(self, sentence: str) -> CustomLossFailed:
        return CustomLossFailed(f"the custom loss {self._graph.name!r} failed: {sentence}")

    def _values(self, inputs: Sequence[Tensor]) -> list[object]:
        values: list[object] = list(inputs)
        calls = self._graph.nodes[len(inputs) :]
        for node, function in zip(calls, self._functions, strict=True):
            if time.process_time() >= self._deadline:
                raise self.failed(f"its processor time was over; {node} was next")
            try:
                values.append(_call(node, function, values))
            except Exception as error:  # torch and Python raise any kind for wrong arguments
                raise self._failure(str(node), error) from error
        return values

    def _gradient(self, loss: Tensor, leaf: Tensor) -> Tensor:
        if not loss.requires_grad:
            raise self.failed("its loss does not depend on the logprobs")
        try:
            (found,) = torch.autograd.grad(loss, leaf, allow_unused=True)
        except (RuntimeError, MemoryError) as error:
            raise self._failure("its gradient", error) from error
        if found is None:
            raise self.failed("its loss does not depend on the logprobs of every datum")
        if not _is_finite(found):
            raise self.failed(
                "its derivative by the logprobs is not finite, though the loss is; look for a "
                "square root, a logarithm or a division at 0 behind a where"
            )
        return found

    def _failure(self, where: str, error: Exception) -> CustomLossFailed:
        sentence = describe(error, typed=True).splitlines()[0]
        if isinstance(error, MemoryError) or any(text in sentence for text in _NO_MEMORY):
            sentence = "it needs more memory than a custom loss may take"
        return self.failed(f"{where}: {sentence}"[:600])

    def _number(self, name: str, value: object) -> float:
        if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
            return float(value.detach().item())
        if isinstance(value, int | float):
            return float(value)
        shape = f" of shape {list(value.shape)}" if isinstance(value, Tensor) else ""
        raise self.failed(
            f"the metric {name!r} must be a scalar tensor, not a {type(value).__name__}{shape}"
        )


def _call(node: Node, function: Implementation, values: Sequence[object]) -> object:
    args = [_resolve(each, values) for each in node.args]
    keywords = {
        key: _resolve(each, values)
        for key, each in node.kwargs.items()
        if key not in ("device", "layout", "memory_format")
    }
    return function(*args, **keywords)


def _resolve(argument: Argument, values: Sequence[object]) -> object:
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


def _is_finite(value: object) -> bool:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return True
    return bool(torch.isfinite(value).all())
