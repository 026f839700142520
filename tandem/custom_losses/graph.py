"""Reads the body of create_custom_loss into a checked `Graph`, and refuses everything else."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import Literal, NoReturn

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from tandem.custom_losses.operations import (
    ATTRIBUTES,
    DTYPES,
    FORBIDDEN_KEYWORDS,
    FUNCTIONS,
    METHODS,
    PUBLIC_NAMES,
)
from tandem.errors import CustomLossInvalid, MalformedPayload

MAX_BYTES = 2**20
MAX_NODES = 2000
MAX_INPUTS = 16
_MAX_ARGUMENTS = 256
_MAX_DEPTH = 6
_MAX_TEXT = 64

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_INPUT = re.compile(r"[a-z_][a-z0-9_]{0,63}")
_METRIC = re.compile(r"custom/[a-z0-9_./-]{1,64}:(sum|mean)")


@dataclass(frozen=True)
class Ref:
    """The value of an earlier node, by its index."""

    node: int


@dataclass(frozen=True)
class DType:
    """A torch dtype, one of `operations.DTYPES`."""

    name: str


Argument = (
    None
    | bool
    | int
    | float
    | str
    | EllipsisType
    | Ref
    | DType
    | slice
    | list["Argument"]
    | tuple["Argument", ...]
)
"""Devices, layouts and memory formats become None: the trainer's device computes the loss."""


@dataclass(frozen=True)
class Node:
    """One step of a graph: an input, or a call of `target`.

    `target` is an input's name, one of `operations.FUNCTIONS` or one of `operations.METHODS`.
    `name` is the client's, for error messages."""

    kind: Literal["input", "function", "method"]
    name: str
    target: str
    args: tuple[Argument, ...]
    kwargs: Mapping[str, Argument]

    def __str__(self) -> str:
        what = f".{self.target}()" if self.kind == "method" else self.target
        return f"node {self.name!r} ({what})"


class LossInput(BaseModel):
    """An input of the client's function. `rank`: the dimensions of each datum's value."""

    model_config = ConfigDict(frozen=True)

    name: str = Field(max_length=64)
    rank: Literal[0, 1, 2]


@dataclass(frozen=True)
class Graph:
    """Nodes in the order of computation: one for each of `inputs`, then the calls.

    The first input is `logprobs`. `loss` and `metrics` refer to nodes."""

    name: str
    inputs: tuple[LossInput, ...]
    nodes: tuple[Node, ...]
    loss: Ref
    metrics: Mapping[str, Ref]


class _Node(BaseModel):
    model_config = ConfigDict(extra="forbid")

    op: str = Field(max_length=32)
    name: str = Field(max_length=128)
    target: str = Field(max_length=200)
    args: list[JsonValue] = []
    kwargs: dict[str, JsonValue] = {}


class _Graph(BaseModel):
    format: Literal[1] = 1
    nodes: list[_Node]


class _Definition(BaseModel):
    name: str = Field(min_length=1, max_length=200)
    inputs: list[LossInput]
    graph: _Graph


def read_custom_loss(body: bytes) -> Graph:
    """Return the graph of a JSON body of create_custom_loss.

    Raises `MalformedPayload`. Raises `CustomLossInvalid`, which names the node and the operation,
    for a forbidden graph."""
    if len(body) > MAX_BYTES:
        raise CustomLossInvalid(f"the custom loss has {len(body)} bytes, {MAX_BYTES} at most")
    try:
        definition = _Definition.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"][:5])
        raise MalformedPayload(f"the custom loss: {where}: {first['msg']}"[:500]) from error
    return _Reader(definition.name, tuple(definition.inputs)).read(definition.graph.nodes)


class _Reader:
    """Reads the nodes once, in order. A node refers only to earlier ones, so a graph has no
    cycle."""

    def __init__(self, name: str, inputs: tuple[LossInput, ...]) -> None:
        self._name = name
        self._inputs = inputs
        self._index: dict[str, int] = {}  # indices of earlier nodes
        self._where = ""

    def read(self, nodes: Sequence[_Node]) -> Graph:
        self._check_inputs()
        if len(nodes) > MAX_NODES:
            self._refuse(f"it has {len(nodes)} nodes, {MAX_NODES} at most")
        if not nodes or nodes[-1].op != "output":
            self._refuse("its last node must be its output")
        found: list[Node] = []
        for node in nodes[:-1]:
            self._where = f"node {node.name!r} ({node.target}): "
            found.append(self._node(node))
            if node.name in self._index:
                self._refuse("another node has the same name")
            self._index[node.name] = len(self._index)
        if len(found) < len(self._inputs):
            self._refuse(f"it must have a placeholder for each of its {len(self._inputs)} inputs")
        self._where = "the output: "
        loss, metrics = self._output(nodes[-1])
        return Graph(
            name=self._name, inputs=self._inputs, nodes=tuple(found), loss=loss, metrics=metrics
        )

    def _refuse(self, sentence: str) -> NoReturn:
        raise CustomLossInvalid(f"the custom loss {self._name!r}: {self._where}{sentence}")

    def _check_inputs(self) -> None:
        names = [each.name for each in self._inputs]
        if not names or names[0] != "logprobs" or self._inputs[0].rank == 0:
            self._refuse("its first input must be logprobs, of rank 1 or 2")
        if len(names) > MAX_INPUTS:
            self._refuse(f"it has {len(names)} inputs, {MAX_INPUTS} at most")
        if len(set(names)) < len(names):
            self._refuse("two of its inputs have the same name")
        for name in names:
            if not _INPUT.fullmatch(name):
                self._refuse(f"the name of its input {name!r} must be a lowercase identifier")

    def _node(self, node: _Node) -> Node:
        if not _IDENTIFIER.fullmatch(node.name):
            self._refuse("its name is not an identifier")
        expected = self._inputs[len(self._index) :][:1]
        if node.op == "placeholder" or expected:
            if node.op != "placeholder" or not expected or node.target != expected[0].name:
                self._refuse("placeholders come first, in the order of the inputs, one for each")
            if node.args:
                self._refuse("a placeholder has no default")
            return Node("input", name=node.name, target=node.target, args=(), kwargs={})
        target = PUBLIC_NAMES.get(node.target, node.target)
        if node.op not in ("call_function", "call_method"):
            self._refuse(
                f"a node of kind {node.op!r} is not allowed; a custom loss calls functions and "
                "methods of tensors only"
            )
        is_method = node.op == "call_method"
        if target not in (METHODS if is_method else FUNCTIONS):
            hint = "; methods that change a tensor have a form without the underscore"
            self._refuse(
                "this operation is not allowed in a custom loss (see docs/training.md)"
                f"{hint if is_method and target.endswith('_') else ''}"
            )
        for key, value in node.kwargs.items():
            if key in FORBIDDEN_KEYWORDS or not _IDENTIFIER.fullmatch(key):
                self._refuse(f"the keyword {key[:64]!r} is not allowed in a custom loss")
            if key == "inplace" and value is not False:
                self._refuse("a custom loss may not change tensors in place")
        args = tuple(self._argument(value) for value in node.args)
        if target == "getattr" and not (
            len(args) == 2 and isinstance(args[1], str) and args[1] in ATTRIBUTES
        ):
            self._refuse(f"the attributes allowed are {', '.join(sorted(ATTRIBUTES))}")
        if is_method and not (args and isinstance(args[0], Ref)):
            self._refuse("the first argument of a method must be a node")
        return Node(
            "method" if is_method else "function",
            name=node.name,
            target=target,
            args=args,
            kwargs={key: self._argument(value) for key, value in node.kwargs.items()},
        )

    def _argument(self, value: JsonValue, *, depth: int = 0) -> Argument:
        if depth > _MAX_DEPTH:
            self._refuse(f"its arguments are nested more than {_MAX_DEPTH} deep")
        match value:
            case None | bool() | float():
                return value
            case int():
                if not -(2**63) < value < 2**63:
                    self._refuse("a number does not fit into 64 bits")
                return value
            case str():
                if len(value) > _MAX_TEXT:
                    self._refuse(f"a text has more than {_MAX_TEXT} characters")
                return value
            case list():
                return self._list(value, depth=depth)
            case dict() if len(value) == 1:
                [(kind, inner)] = value.items()
                return self._tagged(kind, inner, depth=depth)
            case _:
                self._refuse("an argument is not of a known form")

    def _list(self, values: list[JsonValue], *, depth: int) -> list[Argument]:
        if len(values) > _MAX_ARGUMENTS:
            self._refuse(f"a list has {len(values)} entries, {_MAX_ARGUMENTS} at most")
        return [self._argument(value, depth=depth + 1) for value in values]

    def _tagged(self, kind: str, inner: JsonValue, *, depth: int) -> Argument:
        """Read an argument `{kind: inner}`, which JSON cannot express."""
        match kind, inner:
            case "ref", str():
                return self._ref(inner)
            case "tuple", list():
                return tuple(self._list(inner, depth=depth))
            case "slice", [_, _, _] as bounds:
                return slice(*self._list(bounds, depth=depth))
            case "ellipsis", True:
                return ...
            case "float", ("inf" | "-inf" | "nan") as number:
                return float(number)
            case "dtype", str():
                if inner not in DTYPES:
                    self._refuse(f"the dtype {inner[:64]!r} is not allowed")
                return DType(inner)
            case (("device" | "layout" | "memory_format"), str()):
                return None
            case _:
                self._refuse(f"an argument {{{kind[:64]!r}: …}} is not of a known form")

    def _ref(self, name: str) -> Ref:
        if name not in self._index:
            self._refuse(f"it refers to {name[:128]!r}, which is no earlier node")
        return Ref(self._index[name])

    def _output(self, node: _Node) -> tuple[Ref, dict[str, Ref]]:
        match node.args:
            case [{"tuple": [loss, {"dict": dict() as metrics}]}]:
                pass
            case _:
                self._refuse("a custom loss must return (loss, metrics), metrics being a dict")
        if len(metrics) > _MAX_ARGUMENTS:
            self._refuse(f"it has {len(metrics)} metrics, {_MAX_ARGUMENTS} at most")
        found = {}
        for key, value in metrics.items():
            if not _METRIC.fullmatch(key):
                self._refuse(
                    f"the metric {key[:100]!r} must be named custom/NAME:sum or custom/NAME:mean"
                )
            found[key] = self._value(value, what=f"the metric {key!r}")
        return self._value(loss, what="the loss"), found

    def _value(self, value: JsonValue, *, what: str) -> Ref:
        name = value.get("ref") if isinstance(value, dict) and len(value) == 1 else None
        if not isinstance(name, str):
            self._refuse(f"{what} must be the value of a node")
        return self._ref(name)
