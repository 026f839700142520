"""Groups: devices that workers share, and the rules of sharing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from gateway.workers.requests import Kind, WorkerRequest
from tandem.agent.host import NO_SUSPENDER
from tandem.backends.frameworks import Framework
from tandem.settings.sharing import Sharing

CONTEXT_BYTES = 2**30
"""Device memory that a process keeps while it sleeps: its context and its libraries."""

EVERYTHING: frozenset[Kind] = frozenset({"trainer", "engine", "job"})


@dataclass(frozen=True, kw_only=True)
class WorkerGroup:
    """Devices for workers of these `kinds`.

    At most `workers` rows are placed here (0: any number), and at most `awake` of them occupy the
    devices at once. `awake` 0 means that nobody takes turns: all workers stay awake. `device_bytes`
    is the memory of each device, where 0 is unknown or unbounded. `on_host` means that the devices
    are cores, with the memory of the host.

    A group without `devices` is a whole machine, for workers of up to `most_ranks` ranks. A group
    of a `pool` is one claim of a cluster. It may have several `nodes`, each with these devices and
    with `node_bytes` of host memory for workers, where 0 is unbounded.

    Runs share the devices by its `sharing`. One run may ask to have any group to itself.

    Workers on one `host` share its memory and start a few at a time; "" names none. `launchers`
    names the launcher of each kind of workers. A `drained` group takes no more workers.

    `backends` are the trainer backends of its host, each with the reason against its use, or "".
    It is empty if nobody knows them. `frameworks` are those of its host, by name. `no_suspender` is
    the reason why a job here cannot be suspended, or ""."""

    name: str
    kinds: frozenset[Kind]
    devices: tuple[str, ...] = ()
    sharing: Sharing = Sharing.TIME_SLICE
    awake: int = 1
    workers: int = 16
    device_bytes: int = 0
    on_host: bool = False
    most_ranks: int = 1
    host: str = ""
    pool: str = ""
    nodes: int = 1
    node_bytes: int = 0
    launchers: Mapping[Kind, str] = field(default_factory=dict, compare=False)
    drained: bool = False
    backends: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    frameworks: Mapping[str, Framework] = field(default_factory=dict, compare=False, repr=False)
    no_suspender: str = field(default=NO_SUSPENDER, compare=False, repr=False)

    @property
    def leased(self) -> bool:
        """Whether its workers take turns."""
        return self.awake > 0

    @property
    def roles(self) -> list[str]:
        """Its kinds of workers, in the words of users."""
        words = {"trainer": "trainer", "engine": "sampler"}
        return [words[kind] for kind in words if kind in self.kinds]

    def launcher_of(self, kind: Kind) -> str:
        return self.launchers.get(kind, "agent")

    @property
    def family(self) -> str:
        """The name for users: that of the pool, whose groups are alike, or the group's own."""
        return self.pool or self.name

    @property
    def context_bytes(self) -> int:
        """Memory on each device that a sleeping process keeps beside its state."""
        return 0 if self.on_host else CONTEXT_BYTES

    def is_meant_by(self, name: str) -> bool:
        """Whether a request for this name gets the group; "" means any group."""
        return name in ("", self.name, self.family)

    def offers(self, sharing: Sharing | None) -> bool:
        """Whether runs may share its devices so. None means its own way."""
        return sharing in (None, Sharing.EXCLUSIVE, self.sharing)

    def sharing_of(self, request: WorkerRequest) -> Sharing:
        """Return how a worker here shares the devices. Its group may have another sharing now."""
        return (self.offers(request.sharing) and request.sharing) or self.sharing

    def suits(self, request: WorkerRequest) -> bool:
        """Whether the request allows this group, and the group has a device for each rank.

        The ranks of a job meet on one node."""
        named = not request.groups or bool({self.name, self.family}.intersection(request.groups))
        several = request.kind == "job" and self.nodes_for(request.ranks) > 1
        fits = request.kind in self.kinds and self.has_devices_for(request.ranks)
        return named and fits and self.offers(request.sharing) and not several

    def has_devices_for(self, ranks: int) -> bool:
        nodes = self.nodes_for(ranks)
        return nodes <= self.nodes and ranks % nodes == 0

    def nodes_for(self, ranks: int) -> int:
        return math.ceil(ranks / (len(self.devices) or self.most_ranks))

    def devices_for(self, ranks: int) -> tuple[str, ...]:
        """Return one device for each rank: the first devices of each node."""
        nodes = self.nodes_for(ranks)
        return self.devices[: ranks // nodes] * nodes

    def about(self) -> dict[str, object]:
        """Return the fields that the log and the status show."""
        return {
            "name": self.name,
            "roles": self.roles,
            "sharing": self.sharing,
            "devices": list(self.devices),
            "awake": self.awake,
            "workers": self.workers,
            "device_bytes": self.device_bytes,
            "host": self.host,
        }

    def describe_devices(self) -> str:
        """Literal examples: "train (2 devices)", "train (4 nodes with 8 devices each)"."""
        count = len(self.devices)
        if not count and not self.pool:
            about = f"the whole machine, up to {self.most_ranks} ranks"
        elif not count:
            about = f"up to {self.most_ranks * self.nodes} ranks"
        else:
            about = f"{count} device{'' if count == 1 else 's'}"
            if self.nodes > 1:
                about = f"{self.nodes} nodes with {about} each"
        return f"{self.family} ({about})"
