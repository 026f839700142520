"""The groups of a gateway: declared groups, or the groups of an undeclared host.

`TANDEM_GROUPS` declares groups of local devices. Without it:

    no NVIDIA device   `cpu`: the whole machine, where all workers stay awake
    one                `gpu`: that device, for a trainer and an engine side by side if both fit
    several, one rank  `gpu-N`: each device, for trainers and engines
    several, R ranks   `train-N`: R devices each; `sample-N`: one device each. There are at least
                       as many `sample-N` as `train-N`. R devices or fewer are one group `gpu`.

Where workers are pods, `TANDEM_CLAIM_POOLS` declares pools. Each claim of a pool is a group, also
before it is made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from gateway.workers.groups import EVERYTHING, WorkerGroup
from gateway.workers.overview import Budgets
from gateway.workers.requests import Kind
from tandem.agent.host import Accelerator, Host, accelerator_named
from tandem.backends.registry import backends_of_runs
from tandem.errors import InvalidRequest
from tandem.protocol.devices import Device, parse_device
from tandem.settings.cluster import ClaimPoolSettings
from tandem.settings.gateway import GatewaySettings
from tandem.settings.sharing import GroupSettings, Sharing
from tandem.settings.workers import TrainerSettings

_AWAKE_ON_GPU = 2
"""A trainer and an engine, if both fit."""
_KINDS: dict[str, frozenset[Kind]] = {
    "trainer": frozenset({"trainer", "job"}),
    "sampler": frozenset({"engine"}),
}
"""The kinds of workers of each role."""
_ON_CORES = "a process on cores cannot be suspended"
_LEAST_STARTS = 2
MOST_STARTS = 8
"""Half as many workers of a host start at once as it has cores, within these bounds."""


def groups_of(
    settings: GatewaySettings, host: Host, launchers: Mapping[str, str] | None = None
) -> tuple[WorkerGroup, ...]:
    """Return the declared groups, or those of an undeclared host. `launchers` names the launcher of
    each kind of workers. A job has that of trainers. Raises `InvalidRequest` for groups that host
    or cluster cannot have."""
    backends = host.backends
    if settings.launcher == "kubernetes":  # nobody asks an image for its backends
        said = [settings.trainer.backend, TrainerSettings.model_fields["backend"].default]
        said += [
            str(each["backend"]) for each in settings.model_defaults.values() if "backend" in each
        ]
        backends = dict.fromkeys(said, "") | backends_of_runs()
    names = launchers or {}
    by_kind = {kind: names[role] for role in _KINDS if role in names for kind in _KINDS[role]}
    frameworks = {each.name: each for each in host.frameworks}
    return tuple(
        replace(
            group,
            backends=backends,
            frameworks=frameworks,
            launchers=by_kind,
            no_suspender=_ON_CORES if group.on_host else host.no_suspender,
        )
        for group in _groups_of(settings, host)
    )


def budgets_of(settings: GatewaySettings, host: Host) -> Budgets:
    """Return the limits of the machine. Each pod has memory of its own."""
    pods = settings.launcher == "kubernetes"
    return Budgets(
        host_bytes=0 if pods else settings.host_memory_bytes or host.memory_bytes * 9 // 10,
        starts=min(max(len(host.cores) // 2, _LEAST_STARTS), MOST_STARTS),
        silence=settings.worker_unresponsive_timeout,
        patience=settings.operation_timeout,
    )


def _groups_of(settings: GatewaySettings, host: Host) -> tuple[WorkerGroup, ...]:
    if settings.launcher == "kubernetes":
        return _of_pools(settings)
    if settings.claim_pools:
        raise _pool_fault("pools need TANDEM_LAUNCHER=kubernetes")
    if not settings.groups:
        return _of_host(settings, host)
    groups = tuple(_declared(each, host) for each in settings.groups)
    if repeated := _repeated("groups", (group.name for group in groups)):
        raise _fault(repeated)
    _check_disjoint(groups)
    for role, kinds in sorted(_KINDS.items()):
        if not any(kinds <= group.kinds for group in groups):
            raise _fault(f'no group has "{role}" among its roles')
    return groups


def _kinds_of(roles: Iterable[str]) -> frozenset[Kind]:
    return frozenset().union(*(_KINDS[role] for role in roles))


# --- Pools of claims ------------------------------------------------------------------------------


def _of_pools(settings: GatewaySettings) -> tuple[WorkerGroup, ...]:
    pools = settings.claim_pools
    if settings.groups:
        raise _fault("pods need the pools of TANDEM_CLAIM_POOLS instead")
    if repeated := _repeated("pools", (pool.name for pool in pools)):
        raise _pool_fault(repeated)
    for role in sorted(_KINDS):
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
    return tuple(group_of_claim(pool, number) for pool in pools for number in range(pool.claims))


def group_of_claim(pool: ClaimPoolSettings, number: int) -> WorkerGroup:
    # A pod sees no other devices than those of its claim, and numbers them anew.
    numbered = (str(Device("cuda", cuda=str(index))) for index in range(pool.devices))
    return WorkerGroup(
        name=f"{pool.name}-{number}",
        kinds=_kinds_of(pool.roles),
        devices=tuple(numbered) if pool.has_gpus else (),
        sharing=pool.sharing or Sharing.TIME_SLICE,
        awake=0 if pool.sharing == Sharing.MPS else pool.awake,
        workers=pool.workers,
        device_bytes=pool.memory_bytes,
        on_host=not pool.has_gpus,
        most_ranks=pool.devices,
        pool=pool.name,
        nodes=pool.nodes,
        node_bytes=pool.node_memory_bytes,
    )


# --- Declared groups ------------------------------------------------------------------------------


def _repeated(what: str, names: Iterable[str]) -> str:
    """Literal example: "2 groups have the name 'train'"; "" if all names differ."""
    counted = Counter(names).items()
    return next((f"{n} {what} have the name {name!r}" for name, n in counted if n > 1), "")


def _fault(what: str) -> InvalidRequest:
    return InvalidRequest(f"TANDEM_GROUPS: {what}")


def _pool_fault(what: str) -> InvalidRequest:
    return InvalidRequest(f"TANDEM_CLAIM_POOLS: {what}")


def _declared(declared: GroupSettings, host: Host) -> WorkerGroup:
    try:
        devices = [_known(parse_device(text), host) for text in declared.devices]
    except InvalidRequest as error:
        raise _fault(f"group {declared.name!r}: {error.message}") from error
    if len({device.kind for device in devices}) > 1:
        raise _fault(f"group {declared.name!r} has both cores and NVIDIA devices; it takes one")
    by_mps = declared.sharing == Sharing.MPS
    if by_mps and devices[0].kind == "cpu":
        raise _fault(f"group {declared.name!r} shares cores by mps, which is for NVIDIA devices")
    smallest = min(
        (_accelerator(each, host).memory_bytes for each in devices if each.cuda), default=0
    )
    return WorkerGroup(
        name=declared.name,
        kinds=_kinds_of(declared.roles),
        devices=tuple(map(str, devices)),
        sharing=declared.sharing,
        awake=0 if by_mps else declared.awake,
        workers=declared.workers,
        device_bytes=declared.memory_bytes or smallest,
        on_host=devices[0].kind == "cpu",
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


def _check_disjoint(groups: Sequence[WorkerGroup]) -> None:
    """Raise `InvalidRequest` if two groups, or one group twice, name a device or a core."""
    seen: dict[str, str] = {}
    for group in groups:
        every: list[str] = []
        for device in map(parse_device, group.devices):
            every += [f"core {core}" for core in sorted(device.cores)] or [str(device)]
        for part in every:
            if (other := seen.setdefault(part, group.name)) != group.name:
                raise _fault(f"{part} is in the groups {other!r} and {group.name!r}")
        if len(every) > len(set(every)):
            raise _fault(f"group {group.name!r} names a device twice")


# --- An undeclared host ---------------------------------------------------------------------------


def _of_host(settings: GatewaySettings, host: Host) -> tuple[WorkerGroup, ...]:
    devices = {"trainer": settings.trainer.device, "sampler": settings.sampler.device}
    on_gpu = _kinds_of(role for role in _KINDS if host.accelerators and devices[role] != "cpu")
    on_cpu = EVERYTHING - on_gpu
    groups = [_whole_machine(on_cpu, settings, host)] if on_cpu else []
    if on_gpu:
        groups += _of_gpus(on_gpu, host, ranks=settings.trainer.ranks)
    return tuple(groups)


def _whole_machine(kinds: frozenset[Kind], settings: GatewaySettings, host: Host) -> WorkerGroup:
    """Return the group `cpu`. Host memory and the number of starts bound its workers."""
    return WorkerGroup(
        name="cpu",
        kinds=kinds,
        awake=0,
        workers=0,
        on_host=True,
        most_ranks=max(len(host.cores), settings.trainer.ranks),
        host=host.name,
    )


def _of_gpus(kinds: frozenset[Kind], host: Host, *, ranks: int) -> list[WorkerGroup]:
    gpus = [str(Device("cuda", cuda=each.uuid)) for each in host.accelerators]
    every = WorkerGroup(
        name="gpu",
        kinds=kinds,
        devices=tuple(gpus),
        awake=_AWAKE_ON_GPU,
        device_bytes=min(each.memory_bytes for each in host.accelerators),
        host=host.name,
    )
    engines, trainers = kinds & _KINDS["sampler"], kinds - _KINDS["sampler"]
    if not trainers:
        return _split(every, "sample", gpus, each=1)
    if len(gpus) <= ranks:
        return [every]
    if not engines:
        return _split(every, "train", gpus[: len(gpus) // ranks * ranks], each=ranks)
    if ranks == 1:
        return _split(every, "gpu", gpus, each=1)
    of_trainers = len(gpus) // (ranks + 1) * ranks
    return [
        *_split(replace(every, kinds=trainers), "train", gpus[:of_trainers], each=ranks),
        *_split(replace(every, kinds=engines), "sample", gpus[of_trainers:], each=1),
    ]


def _split(group: WorkerGroup, name: str, gpus: Sequence[str], *, each: int) -> list[WorkerGroup]:
    """Return groups with `each` devices."""
    parts = [tuple(gpus[at : at + each]) for at in range(0, len(gpus), each)]
    return [replace(group, name=f"{name}-{n}", devices=part) for n, part in enumerate(parts)]
