"""On which nodes a trainer's ranks are: from its specification, and from the environment.

A trainer of several nodes is started by one program on each (`trainer_service/node.py`), with the
same specification and the node's number in the environment:

- `TANDEM_NODE_RANK` has it. Without it, torchrun's variables count: `PET_NODE_RANK`, `GROUP_RANK`
  or `RANK`, which is divided by `LOCAL_WORLD_SIZE`, if there is one. Without these,
  `JOB_COMPLETION_INDEX` counts, which an indexed Job of Kubernetes sets.
- `PET_MASTER_ADDR` and `PET_MASTER_PORT`, or `MASTER_ADDR` and `MASTER_PORT`, are where node 0 is
  reached, if the specification does not say.
- `PET_NNODES`, or `WORLD_SIZE` divided by `LOCAL_WORLD_SIZE`, is the number of nodes, if the
  specification leaves it open.

What else they say (`PET_NPROC_PER_NODE`, `LOCAL_RANK`, …) must be so, or the worker does not start.
Of a trainer of one node the environment is not asked.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from tandem.errors import WorkerStartFailed
from tandem.worker import WorkerSpec
from tandem.worker_settings import TrainerSettings

NODE_RANK = "TANDEM_NODE_RANK"
T = TypeVar("T")


@dataclass(frozen=True)
class Topology:
    """`ranks` in all, equally many on each of `nodes`, of which this is number `node`; node 0 is
    reached at `host` and `port`.

    Literal example: with 4 ranks on 2 nodes, `Topology(nodes=2, node=1, ranks=4, host="trainer-a",
    port=29500).local` is `range(2, 4)`.
    """

    nodes: int
    node: int
    ranks: int
    host: str = ""
    port: int = 0

    @property
    def on_each(self) -> int:
        """How many ranks a node has."""
        return self.ranks // self.nodes

    @property
    def local(self) -> range:
        """The ranks of this node."""
        return self.of(self.node)

    def of(self, node: int) -> range:
        """The ranks of a node."""
        return range(node * self.on_each, (node + 1) * self.on_each)

    def node_of(self, rank: int) -> int:
        return rank // self.on_each

    def where(self, rank: int) -> str:
        """Return on which node a rank is, to be put behind its number; "" where there is one."""
        return f" on node {self.node_of(rank)}" if self.nodes > 1 else ""


def listen_on_all_addresses(port: int) -> socket.socket:
    """Return a socket to which other hosts can connect; port 0 is any free one."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def topology_of(
    spec: WorkerSpec, environment: Mapping[str, str], *, first: bool = False
) -> Topology:
    """Return the place of this process; that of the `first` node may go without its number. Raises
    `WorkerStartFailed` with what is missing or contradicts itself."""
    ranks = (spec.trainer or TrainerSettings()).ranks
    if spec.nodes == 1:
        return Topology(nodes=1, node=0, ranks=ranks)
    said = _Environment(environment)
    nodes = spec.nodes or said.nodes() or 1
    if ranks % nodes:
        raise WorkerStartFailed(f"{ranks} ranks cannot be divided equally among {nodes} nodes")
    said.check(nodes=nodes, on_each=ranks // nodes)
    node = said.node()
    if node is None:
        if not first:
            raise WorkerStartFailed(f"which of {nodes} nodes this is, is not said: set {NODE_RANK}")
        node = 0
    if node >= nodes:
        raise WorkerStartFailed(f"there is no node {node}: of {nodes}, the last is {nodes - 1}")
    host, port = _address(spec.rendezvous) if spec.rendezvous else said.rendezvous()
    if nodes > 1 and not host:
        raise WorkerStartFailed(
            "where node 0 is reached is not said: set `rendezvous` in the specification, or "
            "MASTER_ADDR and MASTER_PORT"
        )
    return Topology(nodes=nodes, node=node, ranks=ranks, host=host, port=port)


class _Environment:
    """What the environment says, in numbers; what it does not is None."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment

    def node(self) -> int | None:
        if (ours := self._number(NODE_RANK)) is not None:
            return ours
        rank, each = self._number("RANK"), self._number("LOCAL_WORLD_SIZE")
        theirs = {
            "PET_NODE_RANK": self._number("PET_NODE_RANK"),
            "GROUP_RANK": self._number("GROUP_RANK"),
            # Of a process for each rank; without LOCAL_WORLD_SIZE, a PyTorchJob numbers its pods.
            "RANK": rank // each if rank is not None and each else rank,
        }
        found = _one_of(theirs, what="node")
        return self._number("JOB_COMPLETION_INDEX") if found is None else found

    def nodes(self) -> int | None:
        if (count := self._nnodes()) is not None:
            return count
        world, each = self._number("WORLD_SIZE"), self._number("LOCAL_WORLD_SIZE")
        return world // (each or 1) if world else None

    def check(self, *, nodes: int, on_each: int) -> None:
        """Raise `WorkerStartFailed` if another trainer is meant than one of so many `nodes` with
        so many ranks `on_each`."""
        ours = f"this trainer has {nodes} nodes with {on_each} ranks each"
        if (count := self._nnodes()) not in (None, nodes):
            raise WorkerStartFailed(f"{ours}, and PET_NNODES is {count}")
        # "auto", "gpu" and "cpu" say nothing.
        if (text := self._environment.get("PET_NPROC_PER_NODE", "")).isdecimal():
            self._agree("PET_NPROC_PER_NODE", int(text), {on_each}, ours)
        # Whoever starts one process on each node may count these, or the ranks.
        self._agree("LOCAL_WORLD_SIZE", self._number("LOCAL_WORLD_SIZE"), {1, on_each}, ours)
        self._agree("WORLD_SIZE", self._number("WORLD_SIZE"), {nodes, nodes * on_each}, ours)
        if local := self._number("LOCAL_RANK"):
            raise WorkerStartFailed(
                f"LOCAL_RANK is {local}: start one process on each node; it starts the node's ranks"
            )

    def rendezvous(self) -> tuple[str, int]:
        pairs = {}
        for prefix in ("PET_", ""):
            host = self._environment.get(f"{prefix}MASTER_ADDR", "")
            port = self._number(f"{prefix}MASTER_PORT")
            if host and port:
                pairs[f"{prefix}MASTER_ADDR with {prefix}MASTER_PORT"] = (host, port)
        return _one_of(pairs, what="rendezvous") or ("", 0)

    def _nnodes(self) -> int | None:
        text = self._environment.get("PET_NNODES", "")
        least, _, most = text.partition(":")
        if most and most != least:
            raise WorkerStartFailed(f"PET_NNODES is {text}: the number of nodes must be fixed")
        return self._parse("PET_NNODES", least)

    def _number(self, name: str) -> int | None:
        return self._parse(name, self._environment.get(name, ""))

    @staticmethod
    def _parse(name: str, text: str) -> int | None:
        if text and not text.isdecimal():
            raise WorkerStartFailed(f"{name} is {text[:40]!r}, not a number")
        return int(text) if text else None

    @staticmethod
    def _agree(name: str, value: int | None, allowed: set[int], ours: str) -> None:
        if value is not None and value not in allowed:
            raise WorkerStartFailed(f"{ours}, and {name} is {value}")


def _one_of(said: Mapping[str, T | None], *, what: str) -> T | None:
    """Return what all agree on, None if none says anything."""
    found = {name: value for name, value in said.items() if value is not None}
    if len(set(found.values())) > 1:
        words = ", ".join(f"{name} says {value}" for name, value in found.items())
        raise WorkerStartFailed(f"the environment names more than one {what}: {words}")
    return next(iter(found.values()), None)


def _address(text: str) -> tuple[str, int]:
    """Return host and port of `HOST:PORT`, where an IPv6 address stands in brackets."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal():
        raise WorkerStartFailed(f"the rendezvous {text!r} is not of the form HOST:PORT")
    return host.removeprefix("[").removesuffix("]"), int(port)
