"""Device groups: what workers can be placed on.

They are those of `TANDEM_GROUPS`. Without any, they follow from what the host has:

    no NVIDIA device   `cpu`: the whole machine, for trainers and samplers, not leased
    one                `gpu`: that device, for trainers and samplers in turn
    several            `train`: the first TANDEM_TRAINER_RANKS; `sample-N`: each other device

Where workers are pods, they are those of `TANDEM_CLAIM_POOLS`: each claim that a pool may have is a
group, whether it is made yet or not."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from tandem.agent.host import Accelerator, Host, accelerator_named
from tandem.backends.registry import known_backends
from tandem.errors import InvalidRequest
from tandem.protocol.devices import Device, parse_device
from tandem.settings.cluster import ClaimPoolSettings
from tandem.settings.gateway import GatewaySettings
from tandem.settings.sharing import GroupSettings
from tandem.settings.workers import TrainerSettings

Role = Literal["trainer", "sampler"]

_BOTH: frozenset[Role] = frozenset({"trainer", "sampler"})


@dataclass(frozen=True, kw_only=True)
class DeviceGroup:
    """`devices` of one host for workers of these `roles`: at most `workers` of them (0: any
    number), of which `awake` are awake at once (0: it is not leased, and all always are).

    `memory_bytes` is what each device has, 0 if that is not bounded. Without `devices`, it is the
    whole machine, whose workers choose what they use, and have `most_ranks` each at most.

    A group that is a claim is one of a `pool`. Its workers are pods, each with memory of its own,
    of which those on one node may have `node_memory_bytes` together, 0: any number. It may have
    several `nodes`, and `devices` are those of each, numbered as a pod there sees them.

    `backends` are the trainer backends of its host, with the reason why one cannot be used, or "";
    none: nobody knows."""

    name: str
    roles: frozenset[Role]
    devices: tuple[Device, ...] = ()
    awake: int = 1
    workers: int = 16
    memory_bytes: int = 0
    most_ranks: int = 1
    host: str = ""
    pool: str = ""
    nodes: int = 1
    node_memory_bytes: int = 0
    backends: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    @property
    def leased(self) -> bool:
        return self.awake > 0

    @property
    def whole_machine(self) -> bool:
        return not self.devices and not self.pool

    @property
    def on_cpu(self) -> bool:
        """Whether its workers are known to compute on a CPU; of pods, nobody knows."""
        return not self.pool and all(device.kind == "cpu" for device in self.devices)

    @property
    def family(self) -> str:
        """What users may call it: the pool, whose groups are all alike, or its own name."""
        return self.pool or self.name

    def is_meant_by(self, name: str) -> bool:
        """Whether a session that asks for this group gets it; "" is any."""
        return name in ("", self.name, self.family)

    def devices_for(self, ranks: int) -> tuple[Device, ...]:
        """Return those of a worker with so many ranks: rank i uses the group's device i. On several
        nodes there are equally many ranks, and they use the first devices of each."""
        nodes = self.nodes_for(ranks)
        return self.devices[: ranks // nodes] * nodes

    def has_devices_for(self, ranks: int) -> bool:
        nodes = self.nodes_for(ranks)
        return nodes <= self.nodes and ranks % nodes == 0

    def nodes_for(self, ranks: int) -> int:
        """Return on how many nodes so many ranks are."""
        return math.ceil(ranks / (len(self.devices) or self.most_ranks))

    def about(self) -> dict[str, object]:
        """Return what the log and the status say of it."""
        return {
            "name": self.name,
            "roles": sorted(self.roles),
            "devices": [str(device) for device in self.devices],
            "awake": self.awake,
            "workers": self.workers,
            "memory_bytes": self.memory_bytes,
            "host": self.host,
        }

    def describe(self) -> str:
        """Examples: "train (2 devices)", "train (4 nodes with 8 devices each)"."""
        count = len(self.devices)
        if self.whole_machine:
            about = f"the whole machine, up to {self.most_ranks} ranks"
        elif not count:
            about = f"up to {self.most_ranks * self.nodes} ranks"
        else:
            about = f"{count} device{'' if count == 1 else 's'}"
            if self.nodes > 1:
                about = f"{self.nodes} nodes with {about} each"
        return f"{self.family} ({about})"


def groups_of(settings: GatewaySettings, host: Host) -> tuple[DeviceGroup, ...]:
    """Return the groups that are declared, or those of an undeclared host. Raises `InvalidRequest`
    for groups that the host, or a cluster, cannot have."""
    backends = host.backends
    if settings.launcher == "kubernetes":  # an image is not asked: its administrator is believed
        said = [settings.trainer.backend, TrainerSettings.model_fields["backend"].default]
        said += [
            str(each["backend"]) for each in settings.model_defaults.values() if "backend" in each
        ]
        backends = known_backends() | dict.fromkeys(said, "")
    return tuple(replace(group, backends=backends) for group in _groups_of(settings, host))


def _groups_of(settings: GatewaySettings, host: Host) -> tuple[DeviceGroup, ...]:
    if settings.launcher == "kubernetes":
        return _of_pools(settings)
    if settings.claim_pools:
        raise _pool_fault("there are pools where TANDEM_LAUNCHER is kubernetes alone")
    if not settings.groups:
        return _found(settings, host)
    groups = tuple(_declared(each, host) for each in settings.groups)
    if repeated := _repeated("groups", (group.name for group in groups)):
        raise _fault(repeated)
    _check_disjoint(groups)
    for role in sorted(_BOTH):
        if not any(role in group.roles for group in groups):
            raise _fault(f'no group has "{role}" among its roles')
    return groups


def host_memory_budget(settings: GatewaySettings, host: Host) -> int:
    """Return what all workers together may have of the host's memory; 0: any number of bytes, since
    each pod has its own."""
    if settings.launcher == "kubernetes":
        return 0
    return settings.host_memory_bytes or host.memory_bytes * 9 // 10


def _of_pools(settings: GatewaySettings) -> tuple[DeviceGroup, ...]:
    pools = settings.claim_pools
    if settings.groups:
        raise _fault("pods are placed on the pools of TANDEM_CLAIM_POOLS")
    if repeated := _repeated("pools", (pool.name for pool in pools)):
        raise _pool_fault(repeated)
    for role in sorted(_BOTH):
        if not any(role in pool.roles for pool in pools):
            raise _pool_fault(f'no pool has "{role}" among its roles')
    for pool in pools:
        several = pool.has_claims and len(set(pool.roles)) > 1
        if several and settings.kubernetes.placement == "strict":
            raise _pool_fault(
                f"pool {pool.name!r} is for trainers and samplers, which use a claim on one node; "
                "TANDEM_KUBERNETES_PLACEMENT=strict keeps them on nodes of their own: make a pool "
                "for each, or set it to shared"
            )
    return tuple(_claim(pool, number) for pool in pools for number in range(pool.claims))


def _claim(pool: ClaimPoolSettings, number: int) -> DeviceGroup:
    # A pod sees no other devices than those of its claim, and numbers them anew.
    numbered = (Device("cuda", cuda=str(index)) for index in range(pool.devices))
    return DeviceGroup(
        name=f"{pool.name}-{number}",
        roles=frozenset(pool.roles),
        devices=tuple(numbered) if pool.has_gpus else (),
        awake=pool.awake,
        workers=pool.workers,
        memory_bytes=pool.memory_bytes,
        most_ranks=pool.devices,
        pool=pool.name,
        nodes=pool.nodes,
        node_memory_bytes=pool.node_memory_bytes,
    )


def _repeated(what: str, names: Iterable[str]) -> str:
    """Example: "2 groups have the name 'train'"; "" if all names differ."""
    counted = Counter(names).items()
    return next((f"{n} {what} have the name {name!r}" for name, n in counted if n > 1), "")


def _fault(what: str) -> InvalidRequest:
    return InvalidRequest(f"TANDEM_GROUPS: {what}")


def _pool_fault(what: str) -> InvalidRequest:
    return InvalidRequest(f"TANDEM_CLAIM_POOLS: {what}")


def _declared(declared: GroupSettings, host: Host) -> DeviceGroup:
    try:
        devices = tuple(_known(parse_device(text), host) for text in declared.devices)
    except InvalidRequest as error:
        raise _fault(f"group {declared.name!r}: {error.message}") from error
    if len({device.kind for device in devices}) > 1:
        raise _fault(f"group {declared.name!r} has both cores and NVIDIA devices; it takes one")
    smallest = min(
        (_accelerator(each, host).memory_bytes for each in devices if each.cuda), default=0
    )
    return DeviceGroup(
        name=declared.name,
        roles=frozenset(declared.roles),
        devices=devices,
        awake=declared.awake,
        workers=declared.workers,
        memory_bytes=declared.memory_bytes or smallest,
        host=host.name,
    )


def _known(device: Device, host: Host) -> Device:
    """Return the device as the host names it: an NVIDIA device by its UUID. Raises
    `InvalidRequest` if the host does not have it."""
    if device.kind == "cuda":
        return Device("cuda", cuda=_accelerator(device, host).uuid)
    if missing := device.cores.difference(host.cores):
        has = Device("cpu", cores=frozenset(host.cores))
        lacks = Device("cpu", cores=missing)
        raise InvalidRequest(f"{device} is not there: the host has {has}, and no {lacks}")
    return device


def _accelerator(device: Device, host: Host) -> Accelerator:
    if (found := accelerator_named(device.cuda, host.accelerators)) is not None:
        return found
    has = ", ".join(map(str, host.accelerators))
    raise InvalidRequest(f"{device} is not there: the host has {has or 'no NVIDIA device'}")


def _check_disjoint(groups: Sequence[DeviceGroup]) -> None:
    """Raises `InvalidRequest` for a device, or a core, that is there twice."""
    seen: dict[str, str] = {}
    for group in groups:
        for device in group.devices:
            parts = [f"core {core}" for core in sorted(device.cores)] or [str(device)]
            for part in parts:
                if (other := seen.setdefault(part, group.name)) != group.name:
                    raise _fault(f"{part} is in the groups {other!r} and {group.name!r}")
        every = [part for device in group.devices for part in (device.cores or {device.cuda})]
        if len(every) > len(set(every)):
            raise _fault(f"group {group.name!r} names a device twice")


def _found(settings: GatewaySettings, host: Host) -> tuple[DeviceGroup, ...]:
    devices = {"trainer": settings.trainer.device, "sampler": settings.sampler.device}
    on_gpu = frozenset(role for role in _BOTH if devices[role] != "cpu")
    if not host.accelerators or not on_gpu:
        return (_whole_machine(_BOTH, settings, host),)
    trainers = settings.trainer.ranks if "trainer" in on_gpu else 0
    if on_gpu == _BOTH and len(host.accelerators) <= trainers:
        return (_gpus("gpu", _BOTH, host.accelerators, host),)
    groups = [_whole_machine(_BOTH - on_gpu, settings, host)] if on_gpu != _BOTH else []
    if trainers:
        groups.append(_gpus("train", frozenset({"trainer"}), host.accelerators[:trainers], host))
    if "sampler" in on_gpu:
        groups += [
            _gpus(f"sample-{each.index}", frozenset({"sampler"}), [each], host)
            for each in host.accelerators[trainers:]
        ]
    return tuple(groups)


def _whole_machine(roles: frozenset[Role], settings: GatewaySettings, host: Host) -> DeviceGroup:
    return DeviceGroup(
        name="cpu",
        roles=roles,
        awake=0,
        workers=0,
        most_ranks=max(len(host.cores), settings.trainer.ranks),
        host=host.name,
    )


def _gpus(
    name: str, roles: frozenset[Role], accelerators: Sequence[Accelerator], host: Host
) -> DeviceGroup:
    return DeviceGroup(
        name=name,
        roles=roles,
        devices=tuple(Device("cuda", cuda=each.uuid) for each in accelerators),
        memory_bytes=min(each.memory_bytes for each in accelerators),
        host=host.name,
    )
