from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass

from tandem.errors import WorkerStartFailed
from tandem.protocol.worker import WorkerSpec
from tandem.settings.workers import TrainerSettings

_NODE_RANK = "TANDEM_NODE_RANK"


@dataclass(frozen=True)
class Topology:
    """`ranks` in all, equally many on each of `nodes`. This is number `node`. Node 0 listens at
    `host` and `port`.

    Example: with 4 ranks on 2 nodes, `Topology(nodes=2, node=1, ranks=4, host="trainer-a",
    port=29500).local` is `range(2, 4)`."""

    nodes: int
    node: int
    ranks: int
    host: str = ""
    port: int = 0

    @property
    def on_each(self) -> int:
        return self.ranks // self.nodes

    @property
    def local(self) -> range:
        return self.ranks_of(self.node)

    def ranks_of(self, node: int) -> range:
        return range(node * self.on_each, (node + 1) * self.on_each)

    def node_of(self, rank: int) -> int:
        return rank // self.on_each

    def where(self, rank: int) -> str:
        """Return " on node N", to follow a rank's number in a message, or "" with one node."""
        return f" on node {self.node_of(rank)}" if self.nodes > 1 else ""


def listen_on_all_addresses(port: int) -> socket.socket:
    """Return a socket that other hosts can connect to. Port 0 is any free port."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def node_number(environment: Mapping[str, str]) -> int:
    """Return the number of a node other than 0. Raises `WorkerStartFailed`."""
    text = environment.get(_NODE_RANK, "")
    if not text.isdecimal() or not int(text):
        raise WorkerStartFailed(f"{_NODE_RANK} is {text[:40]!r}: set the node's number, from 1 on")
    return int(text)


def topology_of(spec: WorkerSpec, *, node: int) -> Topology:
    """Raises `WorkerStartFailed`."""
    ranks = (spec.trainer or TrainerSettings()).ranks
    if ranks % spec.nodes:
        raise WorkerStartFailed(f"{ranks} ranks cannot be divided equally among {spec.nodes} nodes")
    if not 0 <= node < spec.nodes:
        raise WorkerStartFailed(
            f"there is no node {node}: of {spec.nodes}, the last is {spec.nodes - 1}"
        )
    if spec.nodes == 1:
        return Topology(nodes=1, node=0, ranks=ranks)
    host, port = _address(spec.rendezvous)
    return Topology(nodes=spec.nodes, node=node, ranks=ranks, host=host, port=port)


def _address(text: str) -> tuple[str, int]:
    """Return host and port of `HOST:PORT`. An IPv6 address stands in brackets."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal():
        raise WorkerStartFailed(f"the rendezvous {text!r} is not of the form HOST:PORT")
    return host.removeprefix("[").removesuffix("]"), int(port)
