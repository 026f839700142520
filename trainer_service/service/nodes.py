"""The nodes of a trainer: node 0's view of the others, and the work of each other node.

Node 0 is the worker proper. Each other node keeps one connection to it (`rendezvous.py`), by which
its ranks get their assignments and their deaths are told, and which is a lifeline both ways: when
node 0 is gone the others end themselves, and when one of them is gone the worker ends, since its
process group is of no use. A node whose host or network is down is gone when nothing was heard of
it for half of the collective timeout, so that it is named before a collective gives up.
"""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from tandem.devices import Device
from tandem.errors import OutOfMemory, TandemError, WorkerDied, WorkerStartFailed
from tandem.telemetry import get_log
from tandem.worker import WorkerSpec
from tandem.worker_settings import TrainerSettings
from trainer_service.compute.topology import MeetingPoint, Topology
from trainer_service.service.deaths import Death, Deaths, RankReport
from trainer_service.service.rank_processes import RankProcesses
from trainer_service.service.rendezvous import (
    ConnectionLost,
    Hello,
    Listener,
    Message,
    Peer,
    interface_of,
    join,
    pump,
)

_DEATH_SECONDS = 1.0
"""Within which the death of a rank is known once rank 0's collectives fail."""


class OtherRanks:
    """All ranks but 0, those of this node and of the others, as rank 0's process has them. Make it
    in the main thread.

    `on_death` is called once, from a thread, with an error that names the rank or the node to
    blame.
    """

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
            ranks=topology.local[1:], devices=devices, on_death=self._deaths.add
        )
        self._nodes = _OtherNodes(spec, topology, on_death=self._deaths.add) if several else None

    def meet(self, *, store_port: int) -> list[MeetingPoint]:
        """Wait until all nodes are here, and let their ranks come to the store on this port. Return
        where the ranks of each node meet. Raises `WorkerStartFailed`."""
        if self._nodes is None:
            return [MeetingPoint(store_port, "lo")]
        return self._nodes.meet(store_port=store_port)

    def assign(self, rank: int, line: str) -> None:
        """Send a rank its assignment."""
        if self._nodes is None or rank in self._topology.local:
            self._local.assign(rank, line)
        else:
            self._nodes.assign(rank, line)

    def cause(self, error: BaseException) -> TandemError:
        """Return why the process group broke, in which rank 0 met this error: the death of another
        rank makes rank 0's collectives fail."""
        own = Death(returncode=1, report=RankReport.of(error)).cause(self._topology.where(0))
        if isinstance(own, OutOfMemory) or self._topology.ranks == 1:
            return own
        return self._deaths.cause(timeout=_DEATH_SECONDS) or own

    def end(self, reason: str) -> None:
        """Tell the other nodes why the worker ends ("": as it should), and kill the ranks here."""
        if self._nodes is not None:
            self._nodes.end(reason)
        self._local.kill()


class _OtherNodes:
    """The other nodes, as node 0 has them."""

    def __init__(
        self, spec: WorkerSpec, topology: Topology, *, on_death: Callable[[Death], None]
    ) -> None:
        settings = spec.trainer or TrainerSettings()
        self._topology = topology
        self._patience = settings.collective_timeout / 2
        self._interface = settings.interface
        self._start_timeout = spec.start_timeout
        self._on_death = on_death
        self._peers: dict[int, Peer] = {}
        self._points: dict[int, MeetingPoint] = {}
        self._changed = threading.Condition()
        self._store_port = 0
        self._ending = False
        self._log = get_log(service="trainer", worker_id=spec.worker_id)  # also in other threads
        self._listener = Listener(
            port=topology.port, secret=spec.secret, on_node=self._receive, log=self._log
        )

    def meet(self, *, store_port: int) -> list[MeetingPoint]:
        nodes = self._topology.nodes
        with self._changed:
            self._store_port = store_port
            all_here = self._changed.wait_for(
                lambda: len(self._peers) == nodes - 1, self._start_timeout
            )
            missing = [str(node) for node in range(1, nodes) if node not in self._peers]
            points = {0: MeetingPoint(store_port, self._interface), **self._points}
        if not all_here:
            raise WorkerStartFailed(
                f"of {nodes} nodes, {', '.join(missing)} did not come to "
                f"{self._topology.host}:{self._topology.port} within {self._start_timeout:g} s"
            )
        return [points[node] for node in range(nodes)]

    def assign(self, rank: int, line: str) -> None:
        peer = self._peers[self._topology.node_of(rank)]
        peer.send(Message(kind="assign", rank=rank, text=line))

    def end(self, reason: str) -> None:
        self._ending = True
        self._listener.close()
        with self._changed:
            peers = list(self._peers.values())
        for peer in peers:
            peer.send(Message(kind="end", text=reason))
            peer.close()

    def _receive(self, connection: socket.socket, hello: Hello) -> None:
        if hello.store:
            self._lead_to_store(connection)
            return
        ranks = self._topology.of(hello.node)
        name = f"node {hello.node} (rank{'s'[: len(ranks) - 1]} {', '.join(map(str, ranks))})"
        peer = Peer(connection, name=name, patience=self._patience)
        if reason := self._add(peer, connection, hello):
            self._log.warning("node_refused", node=hello.node, reason=reason)
            peer.send(Message(kind="end", text=reason))
            peer.close()
            return
        self._log.info("node_joined", node=hello.node, interface=hello.interface)
        try:
            while (message := peer.receive()).kind == "death":
                assert message.death is not None
                self._on_death(message.death)
            sentence = f"{name} ended: {message.text}"
        except ConnectionLost as lost:
            sentence = str(lost)
        if not self._ending:
            self._on_death(Death(node=sentence))

    def _add(self, peer: Peer, connection: socket.socket, hello: Hello) -> str:
        """Take a node in, or return why not."""
        ours, theirs = self._topology, (hello.nodes, hello.ranks)
        if theirs != (ours.nodes, ours.ranks):
            return (
                f"node {hello.node} counts {hello.nodes} nodes with {hello.ranks} ranks in all, "
                f"and node 0 {ours.nodes} with {ours.ranks}"
            )
        with self._changed:
            if hello.node in self._peers:
                return f"there is a node {hello.node} already"
            self._interface = self._interface or interface_of(connection)
            self._peers[hello.node] = peer
            self._points[hello.node] = MeetingPoint(hello.store_port, hello.interface)
            self._changed.notify_all()
        return ""

    def _lead_to_store(self, connection: socket.socket) -> None:
        try:
            store = socket.create_connection(("127.0.0.1", self._store_port), timeout=10)
        except OSError:  # there is none yet, or no longer
            connection.close()
            return
        pump(connection, store)


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
        self._store = socket.create_server(("127.0.0.1", 0))
        self._log = get_log(worker_id=spec.worker_id)
        self._ranks = RankProcesses(ranks=topology.local, devices=devices, on_death=self._tell)

    def run(self) -> None:
        """Join node 0 and follow it until the worker ends. Raises `WorkerStartFailed`, or
        `WorkerDied` unless it ended as it should."""
        spec, topology = self._spec, self._topology
        until = time.monotonic() + spec.start_timeout
        hello = Hello(
            node=topology.node,
            nodes=topology.nodes,
            ranks=topology.ranks,
            store_port=self._store.getsockname()[1],
            interface=self._interface,
        )
        connection = join(topology.host, topology.port, hello, secret=spec.secret, until=until)
        threading.Thread(target=self._serve_store, name="store", daemon=True).start()
        self._peer = peer = Peer(connection, name="node 0 (the worker)", patience=self._patience)
        # Node 0 may be slow to answer while it imports what it needs.
        peer.be_patient(max(self._patience, until - time.monotonic()))
        self._log.info("joined", node=topology.node, at=f"{topology.host}:{topology.port}")
        threading.Thread(target=self._post, args=(peer,), name="post", daemon=True).start()
        try:
            while (message := peer.receive()).kind == "assign":
                self._ranks.assign(message.rank, message.text)
                peer.be_patient(self._patience)
        except ConnectionLost as lost:
            raise WorkerDied(str(lost)) from lost
        if message.text:
            raise WorkerDied(f"node 0 ended: {message.text}")

    def end(self, reason: str) -> None:
        """Tell node 0 why this node ends, and kill its ranks."""
        if self._peer is not None:
            self._peer.send(Message(kind="end", text=reason))
        self._ranks.kill()

    def _tell(self, death: Death) -> None:
        """Those that are early wait until node 0 is there."""
        self._outbox.put(Message(kind="death", death=death))

    def _post(self, peer: Peer) -> None:
        while True:
            peer.send(self._outbox.get())

    def _serve_store(self) -> None:
        """Lead the ranks of this node to the store of node 0."""
        while True:
            rank, _ = self._store.accept()
            threading.Thread(target=self._lead_to_store, args=(rank,), daemon=True).start()

    def _lead_to_store(self, rank: socket.socket) -> None:
        topology = self._topology
        with suppress(WorkerStartFailed):
            there = join(
                topology.host,
                topology.port,
                Hello(node=topology.node, store=True),
                secret=self._spec.secret,
                until=time.monotonic() + self._patience,
            )
            pump(rank, there)
            return
        rank.close()
