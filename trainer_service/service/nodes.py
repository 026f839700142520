"""The nodes of a trainer: node 0's view of the others, and the work of each other node.

Each other node has one connection to node 0 (`node_connection.py`), which carries assignments and
deaths, and is a lifeline both ways. A node that is silent for half of the collective timeout counts
as gone, so it is named before a collective times out."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence

from tandem.errors import OutOfMemory, TandemError, WorkerDied, WorkerStartFailed
from tandem.protocol.devices import Device
from tandem.protocol.worker import WorkerSpec
from tandem.settings.workers import TrainerSettings
from tandem.telemetry import get_log
from trainer_service.compute.topology import Topology
from trainer_service.service.deaths import Death, Deaths, RankReport
from trainer_service.service.node_connection import (
    ConnectionLost,
    Hello,
    Listener,
    Message,
    Peer,
    connect,
    interface_of,
)
from trainer_service.service.rank_processes import RankProcesses

_DEATH_SECONDS = 1.0
"""A rank's death is known within this time after rank 0's collectives fail."""
_HELLO_SECONDS = 10.0


class PeerRanks:
    """All ranks but 0, as seen from rank 0. Create it in the main thread.

    `on_death` is called once, from a thread, with an error that names the causing rank or node."""

    def __init__(
        self,
        spec: WorkerSpec,
        topology: Topology,
        *,
        devices: Sequence[Device],
        on_death: Callable[[TandemError], None],
    ) -> None:
        """Raises `WorkerStartFailed`."""
        self._topology = topology
        several = topology.nodes > 1
        self._deaths = Deaths(
            on_first=on_death,
            settle=1.0 if several else 0.2,
            where=topology.where,
        )
        self._local = RankProcesses(
            ranks=topology.local[1:], devices=devices, on_death=self._deaths.add_death
        )
        self._nodes = (
            _OtherNodes(spec, topology, on_death=self._deaths.add_death) if several else None
        )

    def meet(self) -> list[str]:
        """Wait for all nodes. Return each node's network interface. Raises `WorkerStartFailed`."""
        return ["lo"] if self._nodes is None else self._nodes.meet()

    def assign(self, rank: int, line: str) -> None:
        if self._nodes is None or rank in self._topology.local:
            self._local.assign(rank, line)
        else:
            self._nodes.assign(rank, line)

    def cause(self, error: BaseException) -> TandemError:
        """Return why the process group broke, given the error that rank 0 met."""
        own = Death(returncode=1, report=RankReport.of_error(error)).cause(self._topology.where(0))
        if isinstance(own, OutOfMemory) or self._topology.ranks == 1:
            return own
        return self._deaths.cause(timeout=_DEATH_SECONDS) or own

    def end_worker(self, reason: str) -> None:
        """Tell the other nodes why the worker ends ("" for an orderly end), and kill the ranks
        here."""
        if self._nodes is not None:
            self._nodes.end_worker(reason)
        self._local.kill()


class _OtherNodes:
    def __init__(
        self, spec: WorkerSpec, topology: Topology, *, on_death: Callable[[Death], None]
    ) -> None:
        settings = spec.trainer or TrainerSettings()
        self._topology = topology
        self._patience = settings.collective_timeout / 2
        self._interface = settings.interface
        self._start_timeout = spec.start_timeout
        self._worker_id = spec.worker_id
        self._on_death = on_death
        self._peers: dict[int, Peer] = {}
        self._interfaces: dict[int, str] = {}
        self._changed = threading.Condition()
        self._ending = False
        self._log = get_log(service="trainer", worker_id=spec.worker_id)  # also in other threads
        self._listener = Listener(port=topology.port, on_connection=self._receive)

    def meet(self) -> list[str]:
        nodes = self._topology.nodes
        with self._changed:
            all_here = self._changed.wait_for(
                lambda: len(self._peers) == nodes - 1, self._start_timeout
            )
            missing = [str(node) for node in range(1, nodes) if node not in self._peers]
            interfaces = {0: self._interface, **self._interfaces}
        if not all_here:
            raise WorkerStartFailed(
                f"of {nodes} nodes, {', '.join(missing)} did not come to "
                f"{self._topology.host}:{self._topology.port} within {self._start_timeout:g} s"
            )
        return [interfaces[node] for node in range(nodes)]

    def assign(self, rank: int, line: str) -> None:
        peer = self._peers[self._topology.node_of(rank)]
        peer.send(Message(kind="assign", rank=rank, text=line))

    def end_worker(self, reason: str) -> None:
        self._ending = True
        self._listener.close()
        with self._changed:
            peers = list(self._peers.values())
        for peer in peers:
            peer.send(Message(kind="end", text=reason))
            peer.close()

    def _receive(self, connection: socket.socket, address: str) -> None:
        peer = Peer(connection, name=address, patience=self._patience)
        try:
            hello = peer.receive(within=_HELLO_SECONDS).hello
        except ConnectionLost as lost:
            self._log.warning("stranger_refused", address=address, reason=str(lost))
            hello = None
        if hello is None:
            peer.close()
            return
        if reason := self._add(peer, connection, hello):
            self._log.warning("node_refused", node=hello.node, reason=reason)
            peer.send(Message(kind="end", text=reason))
            peer.close()
            return
        self._log.info("node_joined", node=hello.node, interface=hello.interface)
        try:
            while (message := peer.receive()).death is not None:
                self._on_death(message.death)
            sentence = f"{peer.name} ended: {message.text}"
        except ConnectionLost as lost:
            sentence = str(lost)
        if not self._ending:
            self._on_death(Death(node=sentence))

    def _add(self, peer: Peer, connection: socket.socket, hello: Hello) -> str:
        ours, theirs = self._topology, (hello.nodes, hello.ranks)
        if hello.worker_id != self._worker_id:
            return f"node {hello.node} belongs to the worker {hello.worker_id}"
        if theirs != (ours.nodes, ours.ranks):
            return (
                f"node {hello.node} counts {hello.nodes} nodes with {hello.ranks} ranks in all, "
                f"and node 0 {ours.nodes} with {ours.ranks}"
            )
        if hello.node >= ours.nodes:
            return f"there is no node {hello.node}"
        ranks = ours.ranks_of(hello.node)
        peer.name = f"node {hello.node} (rank{'s'[: len(ranks) - 1]} {', '.join(map(str, ranks))})"
        with self._changed:
            if hello.node in self._peers:
                return f"there is a node {hello.node} already"
            self._interface = self._interface or interface_of(connection)
            self._peers[hello.node] = peer
            self._interfaces[hello.node] = hello.interface
            self._changed.notify_all()
        return ""


class Member:
    """A node other than 0: starts its ranks, follows node 0, and ends with it."""

    def __init__(self, spec: WorkerSpec, topology: Topology, *, devices: Sequence[Device]) -> None:
        """Call from the main thread."""
        settings = spec.trainer or TrainerSettings()
        self._spec = spec
        self._topology = topology
        self._patience = settings.collective_timeout / 2
        self._interface = settings.interface
        self._peer: Peer | None = None
        self._outbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._log = get_log(worker_id=spec.worker_id)
        self._ranks = RankProcesses(ranks=topology.local, devices=devices, on_death=self._tell)

    def follow_first_node(self) -> None:
        """Follow node 0 until the worker ends.

        Raises `WorkerStartFailed`, or `WorkerDied` unless the end was orderly."""
        spec, topology = self._spec, self._topology
        until = time.monotonic() + spec.start_timeout
        connection = connect(topology.host, topology.port, node=topology.node, until=until)
        self._peer = peer = Peer(connection, name="node 0 (the worker)", patience=self._patience)
        hello = Hello(
            worker_id=spec.worker_id,
            node=topology.node,
            nodes=topology.nodes,
            ranks=topology.ranks,
            interface=self._interface or interface_of(connection),
        )
        peer.send(Message(kind="hello", hello=hello))
        self._log.info("joined", node=topology.node, at=f"{topology.host}:{topology.port}")
        threading.Thread(target=self._post, args=(peer,), name="post", daemon=True).start()
        # Node 0 may answer late while it imports libraries.
        within = max(self._patience, until - time.monotonic())
        try:
            while (message := peer.receive(within=within)).kind == "assign":
                self._ranks.assign(message.rank, message.text)
                within = self._patience
        except ConnectionLost as lost:
            raise WorkerDied(str(lost)) from lost
        if message.text:
            raise WorkerDied(f"node 0 ended: {message.text}")

    def end_worker(self, reason: str) -> None:
        if self._peer is not None:
            self._peer.send(Message(kind="end", text=reason))
        self._ranks.kill()

    def _tell(self, death: Death) -> None:
        """Queue a death until node 0 is connected."""
        self._outbox.put(Message(kind="death", death=death))

    def _post(self, peer: Peer) -> None:
        while True:
            peer.send(self._outbox.get())
