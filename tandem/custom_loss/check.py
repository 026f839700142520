"""Reads the body of create_custom_loss, and refuses whatever is not plainly allowed.

Needs no torch: the gateway checks a loss when it is created, and the trainer again, since it
trusts no bytes that came from outside.
"""

from __future__ import annotations

import math
import re
from typing import Literal, NoReturn

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from tandem.custom_loss.graph import (
    Argument,
    CustomInput,
    DType,
    Graph,
    Items,
    Node,
    Place,
    Ref,
    Slice,
)
from tandem.custom_loss.names import (
    ATTRIBUTES,
    DTYPES,
    FORBIDDEN_KEYWORDS,
    FUNCTIONS,
    METHODS,
    TRACED_NAMES,
)
from tandem.errors import CustomLossInvalid, MalformedPayload

MAX_BYTES = 2**20
MAX_NODES = 2000
MAX_INPUTS = 16
_MAX_ARGUMENTS = 256
_MAX_DEPTH = 6
_MAX_TEXT = 64
_LARGEST = 2**63
_SEE = " (docs/custom-losses.md lists what is)"

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_INPUT = re.compile(r"[a-z_][a-z0-9_]{0,63}")
_METRIC = re.compile(r"custom/[a-z0-9_./-]{1,64}:(sum|mean)")
_FLOATS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


class _Input(BaseModel):
    name: str = Field(max_length=64)
    rank: Literal[0, 1, 2]


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
    inputs: list[_Input]
    graph: _Graph


def read_custom_loss(body: bytes) -> Graph:
    """Raises `MalformedPayload` for what is no JSON of this form, and `CustomLossInvalid`, which
    names the node and the operation, for what a custom loss may not do."""
    if len(body) > MAX_BYTES:
        raise CustomLossInvalid(f"the custom loss has {len(body)} bytes, {MAX_BYTES} at most")
    try:
        definition = _Definition.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"][:5])
        raise MalformedPayload(f"the custom loss: {where}: {first['msg']}"[:500]) from error
    return _Reader(definition).read()


class _Reader:
    """Goes through the nodes once, in order, so that a node can name earlier ones alone: a
    graph that passes has no cycle."""

    def __init__(self, definition: _Definition) -> None:
        self._definition = definition
        self._places: dict[str, int] = {}
        self._arguments = 0
        self._now = ""

    def read(self) -> Graph:
        inputs = self._inputs()
        nodes = self._definition.graph.nodes
        if len(nodes) > MAX_NODES:
            self._refuse(f"it has {len(nodes)} nodes, {MAX_NODES} at most")
        if not nodes or nodes[-1].op != "output":
            self._refuse("its last node must be its output")
        found: list[Node] = []
        for node in nodes[:-1]:
            self._now = f"node {node.name!r} ({node.target})"
            found.append(self._node(node, number=len(found), inputs=inputs))
            if node.name in self._places:
                self._refuse("another node has the same name")
            self._places[node.name] = len(found) - 1
        if len(found) < len(inputs) or found[len(inputs) - 1].kind != "input":
            self._refuse(f"it must have a placeholder for each of its {len(inputs)} inputs")
        self._now = "the output"
        loss, metrics = self._output(nodes[-1])
        return Graph(
            name=self._definition.name,
            inputs=inputs,
            nodes=tuple(found),
            loss=loss,
            metrics=metrics,
        )

    def _refuse(self, sentence: str) -> NoReturn:
        where = f"{self._now}: " if self._now else ""
        raise CustomLossInvalid(f"the custom loss {self._definition.name!r}: {where}{sentence}")

    def _inputs(self) -> tuple[CustomInput, ...]:
        inputs = self._definition.inputs
        names = [each.name for each in inputs]
        if not names or names[0] != "logprobs" or inputs[0].rank == 0:
            self._refuse("its first input must be logprobs, of rank 1 or 2")
        if len(names) > MAX_INPUTS:
            self._refuse(f"it has {len(names)} inputs, {MAX_INPUTS} at most")
        if len(set(names)) < len(names):
            self._refuse("two of its inputs have the same name")
        for name in names:
            if not _INPUT.fullmatch(name):
                self._refuse(f"the name of its input {name!r} must be a lowercase identifier")
        return tuple(CustomInput(name=each.name, rank=each.rank) for each in inputs)

    def _node(self, node: _Node, *, number: int, inputs: tuple[CustomInput, ...]) -> Node:
        if not _IDENTIFIER.fullmatch(node.name):
            self._refuse("its name is not an identifier")
        if node.op == "placeholder":
            if number >= len(inputs) or node.target != inputs[number].name or node.args:
                self._refuse("placeholders come first, in the order of the inputs, one for each")
            return Node(kind="input", name=node.name, target=node.target)
        if number < len(inputs):
            self._refuse("placeholders come first, in the order of the inputs, one for each")
        if node.op not in ("call_function", "call_method"):
            self._refuse(
                f"a node of kind {node.op!r} is not allowed; a custom loss calls functions and "
                "methods of tensors alone"
            )
        target = TRACED_NAMES.get(node.target, node.target)
        if node.op == "call_function" and target not in FUNCTIONS:
            self._refuse(
                "this function is not allowed in a custom loss (see docs/custom-losses.md)"
            )
        if node.op == "call_method" and target not in METHODS:
            hint = (
                "; it changes a tensor in place: use the form without the underscore"
                if target.endswith("_")
                else _SEE
            )
            self._refuse(f"this method is not allowed in a custom loss{hint}")
        for key, value in node.kwargs.items():
            if key in FORBIDDEN_KEYWORDS or not _IDENTIFIER.fullmatch(key):
                self._refuse(f"the keyword {key[:64]!r} is not allowed in a custom loss")
            if key == "inplace" and value is not False:
                self._refuse("a custom loss may not change tensors in place")
        if target == "getattr" and not (
            len(node.args) == 2 and isinstance(node.args[1], str) and node.args[1] in ATTRIBUTES
        ):
            self._refuse(f"the attributes allowed are {', '.join(sorted(ATTRIBUTES))}")
        args = tuple(self._argument(value, depth=0) for value in node.args)
        if node.op == "call_method" and not (args and isinstance(args[0], Ref)):
            self._refuse("the first argument of a method must be a node")
        return Node(
            kind="function" if node.op == "call_function" else "method",
            name=node.name,
            target=target,
            args=args,
            kwargs={k: self._argument(v, depth=0) for k, v in node.kwargs.items()},
        )

    def _argument(self, value: JsonValue, *, depth: int) -> Argument:
        self._arguments += 1
        if depth > _MAX_DEPTH:
            self._refuse(f"its arguments are nested more than {_MAX_DEPTH} deep")
        if self._arguments > _MAX_ARGUMENTS * MAX_NODES:
            self._refuse("the graph has too many arguments")
        match value:
            case None | bool() | float():
                return value
            case int():
                if not -_LARGEST < value < _LARGEST:
                    self._refuse("a number does not fit into 64 bits")
                return value
            case str():
                if len(value) > _MAX_TEXT:
                    self._refuse(f"a text has more than {_MAX_TEXT} characters")
                return value
            case list():
                return Items(items=self._all(value, depth=depth), is_tuple=False)
            case dict() if len(value) == 1:
                [(kind, inner)] = value.items()
                return self._tagged(kind, inner, depth=depth)
            case _:
                self._refuse("an argument is not of a known form")

    def _all(self, values: list[JsonValue], *, depth: int) -> tuple[Argument, ...]:
        if len(values) > _MAX_ARGUMENTS:
            self._refuse(f"a list has {len(values)} entries, {_MAX_ARGUMENTS} at most")
        return tuple(self._argument(value, depth=depth + 1) for value in values)

    def _tagged(self, kind: str, inner: JsonValue, *, depth: int) -> Argument:
        match kind, inner:
            case "ref", str():
                return self._ref(inner)
            case "tuple", list():
                return Items(items=self._all(inner, depth=depth), is_tuple=True)
            case "slice", [start, stop, step]:
                return Slice(
                    start=self._argument(start, depth=depth + 1),
                    stop=self._argument(stop, depth=depth + 1),
                    step=self._argument(step, depth=depth + 1),
                )
            case "ellipsis", True:
                return ...
            case "float", "inf" | "-inf" | "nan":
                assert isinstance(inner, str)
                return _FLOATS[inner]
            case "dtype", str():
                if inner not in DTYPES:
                    self._refuse(f"the dtype {inner[:64]!r} is not allowed")
                return DType(name=inner)
            case (("device" | "layout" | "memory_format"), str()):
                return Place()
            case _:
                self._refuse(f"an argument {{{kind[:64]!r}: …}} is not of a known form")

    def _ref(self, name: str) -> Ref:
        place = self._places.get(name)
        if place is None:
            self._refuse(f"it names {name[:128]!r}, which is no earlier node")
        return Ref(node=place)

    def _output(self, node: _Node) -> tuple[Ref, dict[str, Ref]]:
        returned = node.args[0] if len(node.args) == 1 else None
        if isinstance(returned, dict) and len(returned) == 1:
            returned = returned.get("tuple")
        if not (isinstance(returned, list) and len(returned) == 2):
            self._refuse("a custom loss must return (loss, metrics)")
        loss = self._value(returned[0], what="the loss")
        metrics = returned[1]
        if isinstance(metrics, dict) and list(metrics) == ["dict"]:
            metrics = metrics["dict"]
        if not isinstance(metrics, dict):
            self._refuse("its metrics must be a dict")
        if len(metrics) > _MAX_ARGUMENTS:
            self._refuse(f"it has {len(metrics)} metrics, {_MAX_ARGUMENTS} at most")
        found = {}
        for key, value in metrics.items():
            if not _METRIC.fullmatch(key):
                self._refuse(
                    f"the metric {key[:100]!r} must be named custom/NAME:sum or custom/NAME:mean"
                )
            found[key] = self._value(value, what=f"the metric {key!r}")
        return loss, found

    def _value(self, value: JsonValue, *, what: str) -> Ref:
        if isinstance(value, dict) and list(value) == ["ref"] and isinstance(value["ref"], str):
            return self._ref(value["ref"])
        self._refuse(f"{what} must be the value of a node")
