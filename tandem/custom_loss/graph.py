"""A checked custom loss: what is left of a client's graph once nothing in it can surprise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import EllipsisType
from typing import Literal


@dataclass(frozen=True)
class Ref:
    """The value of an earlier node, by its place among the nodes."""

    node: int


@dataclass(frozen=True)
class DType:
    """A torch dtype, one of `names.DTYPES`."""

    name: str


@dataclass(frozen=True)
class Place:
    """A device, layout or memory format: accepted and not looked at, since a loss is computed
    where the trainer computes."""


@dataclass(frozen=True)
class Slice:
    start: Argument
    stop: Argument
    step: Argument


@dataclass(frozen=True)
class Items:
    """A list, or a tuple."""

    items: tuple[Argument, ...]
    is_tuple: bool


Argument = None | bool | int | float | str | EllipsisType | Ref | DType | Place | Slice | Items


@dataclass(frozen=True)
class Node:
    """`kind` "input": the input of that number in `target`'s stead; "function": a name of
    `names.FUNCTIONS`; "method": of `names.METHODS`. `name` is the client's, for sentences."""

    kind: Literal["input", "function", "method"]
    name: str
    target: str
    args: tuple[Argument, ...] = ()
    kwargs: Mapping[str, Argument] | None = None

    def __str__(self) -> str:
        what = f".{self.target}()" if self.kind == "method" else self.target
        return f"node {self.name!r} ({what})"


@dataclass(frozen=True)
class CustomInput:
    """`rank`: dimensions of every datum's value. The first input is `logprobs`."""

    name: str
    rank: Literal[0, 1, 2]


@dataclass(frozen=True)
class Graph:
    """The nodes in the order in which they are computed; inputs come first, in the order of
    `inputs`. `loss` and `metrics` say which node's value each is."""

    name: str
    inputs: tuple[CustomInput, ...]
    nodes: tuple[Node, ...]
    loss: Ref
    metrics: Mapping[str, Ref]
