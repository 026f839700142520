"""Device groups: what workers can be placed on.

They are those of `TANDEM_GROUPS`. Without any, they follow from what the host has:

    no NVIDIA device   `cpu`: the whole machine, for trainers and samplers, not leased
    one                `gpu`: that device, for trainers and samplers in turn
    several            `train`: the first TANDEM_TRAINER_RANKS; `sample-N`: each other device
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tandem.devices import Device, parse_device
from tandem.errors import InvalidRequest
from tandem.host import Accelerator, Host
from tandem.settings import GatewaySettings, GroupSettings

Role = Literal["trainer", "sampler"]

_BOTH: frozenset[Role] = frozenset({"trainer", "sampler"})


@dataclass(frozen=True, kw_only=True)
class DeviceGroup:
    """`devices` of one host for workers of these `roles`: at most `workers` of them (0: any
    number), of which `awake` are awake at once (0: it is not leased, and all always are).

    `memory_bytes` is what each device has, 0 if that is not bounded. Without `devices`, it is the
    whole machine, whose workers choose what they use, and have `most_ranks` each at most.
    """

    name: str
    roles: frozenset[Role]
    devices: tuple[Device, ...] = ()
    awake: int = 1
    workers: int = 16
    memory_bytes: int = 0
    most_ranks: int = 1
    host: str = ""

    @property
    def leased(self) -> bool:
        return self.awake > 0

    def devices_for(self, ranks: int) -> tuple[Device, ...]:
        """Return those of a worker with so many ranks: rank i uses the group's device i."""
        return self.devices[:ranks]

    def has_devices_for(self, ranks: int) -> bool:
        return ranks <= (len(self.devices) or self.most_ranks)

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
        """Literal example: "train (2 devices)"."""
        if not self.devices:
            return f"{self.name} (the whole machine, up to {self.most_ranks} ranks)"
        count = len(self.devices)
        return f"{self.name} ({count} device{'' if count == 1 else 's'})"


def groups_of(settings: GatewaySettings, host: Host) -> tuple[DeviceGroup, ...]:
    """Return the groups that are declared, or those of an undeclared host. Raises `InvalidRequest`
    for groups that the host cannot have."""
    if not settings.groups:
        return _found(settings, host)
    groups = tuple(_declared(each, host) for each in settings.groups)
    for name, count in Counter(group.name for group in groups).items():
        if count > 1:
            raise _fault(f"{count} groups have the name {name!r}")
    _check_disjoint(groups)
    for role in sorted(_BOTH):
        if not any(role in group.roles for group in groups):
            raise _fault(f'no group has "{role}" among its roles')
    return groups


def _fault(what: str) -> InvalidRequest:
    return InvalidRequest(f"TANDEM_GROUPS: {what}")


def _declared(declared: GroupSettings, host: Host) -> DeviceGroup:
    try:
        devices = tuple(_known(parse_device(text), host) for text in declared.devices)
    except InvalidRequest as error:
        raise _fault(f"group {declared.name!r}: {error.message}") from error
    if len({device.kind for device in devices}) > 1:
        raise _fault(f"group {declared.name!r} has both cores and NVIDIA devices; it takes one")
    if declared.roles == ["sampler"] and len(devices) > 1:
        raise _fault(
            f"group {declared.name!r} is for samplers alone and has {len(devices)} devices, of "
            "which a sampler uses one; make a group of each"
        )
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
    for each in host.accelerators:
        if device.cuda in (str(each.index), each.uuid):
            return each
    has = ", ".join(f"cuda:{each.index} ({each.uuid})" for each in host.accelerators)
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
