"""A seeded killer of processes, disks and connections.

The seed alone decides each fault and its victim. A process is chosen by its position among those of
its kind, because process ids differ from run to run."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from tests.chaos.machine import Machine
from tests.support.processes import fill
from tests.support.waiting import wait_until

UNRESPONSIVE = 5.0
COLLECTIVE = 8.0
SESSION = 40.0
"""The machine's deadlines, in seconds. A frozen process stands still for up to twice its longest
one. A session's leaves room for lost heartbeats: the SDK sends one every ten seconds."""
SETTINGS = {
    "worker_unresponsive_timeout": str(UNRESPONSIVE),
    "trainer_collective_timeout": str(COLLECTIVE),
    "session_ttl": str(SESSION),
    "min_free_bytes": "0",  # a write must fail
    # Idle processes would be struck too, without effect.
    "pool_processes": "0",
}

_MOST_ENDS, _WITHIN = 4, 61.0
"""A stack ends if its gateway or agent ends five times within a minute."""

_AGENT, _GATEWAY, _TRAINER = ("-m tandem.agent",), ("-m gateway",), ("trainer_service",)
_ENGINE = ("sampler_service", "VLLM")
_WRITTEN = ("snapshots", "weights", "checkpoints")


class Killer:
    def __init__(self, machine: Machine, *, seed: int, only: Sequence[str] = ()) -> None:
        self._machine = machine
        self._seed = seed
        self._number = 0
        self._rng = random.Random(seed)
        self._faults: dict[str, Callable[[], None]] = {
            "kill -9 of the gateway": lambda: self._end(_GATEWAY),
            "kill -9 of the agent": lambda: self._end(_AGENT),
            "kill -9 of a trainer": lambda: self._kill(_TRAINER),
            "kill -9 of an engine": lambda: self._kill(_ENGINE),
            "kill -9 of a trainer that writes": self._kill_writer,
            "kill -9 of all at once": self._crash,
            "tandem up is stopped and started": self._restart,
            "the gateway is asked to end": lambda: self._signal(_GATEWAY, signal.SIGTERM),
            "the gateway stands still": lambda: self._freeze(_GATEWAY, UNRESPONSIVE),
            "the agent stands still": lambda: self._freeze(_AGENT, UNRESPONSIVE),
            "a trainer stands still": lambda: self._freeze(_TRAINER, max(UNRESPONSIVE, COLLECTIVE)),
            "an engine stands still": lambda: self._freeze(_ENGINE, UNRESPONSIVE),
            "the connections of the clients break": self._cut_clients,
            "the connections of the workers break": self._cut_workers,
        }
        if machine.own_disk:
            self._faults["the disk is full"] = self._fill_disk
            self._faults["kill -9 of a trainer while the disk is full"] = self._kill_on_full_disk
        self._faults = {
            name: fault
            for name, fault in self._faults.items()
            if not only or any(part in name for part in only)
        }
        self._deck: list[str] = []
        self._ends: dict[tuple[str, ...], deque[float]] = {_GATEWAY: deque(), _AGENT: deque()}

    def choose(self) -> str:
        """Return the next fault. Each comes once before any comes again."""
        self._number += 1
        # Each fault has its own generator: the number of draws depends on the number of processes.
        self._rng = random.Random(f"{self._seed}:{self._number}")
        if not self._deck:
            self._deck = self._rng.sample(sorted(self._faults), len(self._faults))
        return self._deck.pop()

    def strike(self, name: str) -> None:
        self._faults[name]()

    # --- Deaths -------------------------------------------------------------------------------

    def _end(self, who: tuple[str, ...]) -> None:
        self._note_end(who)
        self._kill(who)

    def _note_end(self, who: tuple[str, ...]) -> None:
        """Note the coming end of the gateway or the agent. Wait while it would end the whole
        stack."""
        ends = self._ends[who]
        if len(ends) == _MOST_ENDS:
            time.sleep(max(0.0, ends.popleft() + _WITHIN - time.monotonic()))
        ends.append(time.monotonic())

    def _kill(self, who: tuple[str, ...]) -> None:
        self._signal(who, signal.SIGKILL)

    def _signal(self, who: tuple[str, ...], number: signal.Signals) -> None:
        _signal(self._one(who), number)

    def _one(self, who: tuple[str, ...]) -> int:
        found = wait_until(lambda: self._machine.found(*who), what=f"there is a {who[0]}")
        return self._rng.choice(found)

    def _crash(self) -> None:
        self._machine.crash()
        self._machine.start()

    def _restart(self) -> None:
        self._machine.stop()
        self._machine.start()

    def _kill_writer(self) -> None:
        changes = self._rng.randrange(4)
        share = self._rng.random()
        partial = wait_until(self._partial, what="something is written")
        session = partial.parent.name.partition("_")[0]
        ranks = [pid for pid in self._machine.found(*_TRAINER) if session in _output_of(pid)]
        before = None
        while partial.exists() and changes:  # no sleep: the writing takes some milliseconds
            found = _content(partial)
            changes -= before is not None and found != before
            before = found
        if ranks:
            _signal(ranks[int(share * len(ranks))], signal.SIGKILL)

    def _partial(self) -> Path | None:
        folders = (self._machine.data_dir / name for name in _WRITTEN)
        return next((path for each in folders for path in each.glob("*/.partial-*")), None)

    # --- Standstills --------------------------------------------------------------------------

    def _freeze(self, who: tuple[str, ...], deadline: float) -> None:
        seconds = deadline * self._rng.uniform(0.1, 2.0)
        if who in self._ends and seconds > UNRESPONSIVE:  # `tandem up` kills it
            self._note_end(who)
        pid = self._one(who)
        _signal(pid, signal.SIGSTOP)
        try:
            time.sleep(seconds)
        finally:
            _signal(pid, signal.SIGCONT)

    # --- Disks --------------------------------------------------------------------------------

    @contextmanager
    def _full_disk(self) -> Iterator[None]:
        left = self._rng.choice((0, 4096, 100_000))
        ballast = self._machine.data_dir / "ballast"
        fill(ballast)
        os.truncate(ballast, max(0, ballast.stat().st_size - left))
        try:
            yield
        finally:
            ballast.unlink()

    def _fill_disk(self) -> None:
        with self._full_disk():
            time.sleep(self._rng.uniform(1.0, 6.0))

    def _kill_on_full_disk(self) -> None:
        with self._full_disk():
            self._kill(_TRAINER)
            time.sleep(self._rng.uniform(1.0, 6.0))

    # --- Connections --------------------------------------------------------------------------

    def _cut_clients(self) -> None:
        self._machine.proxy.cut()
        time.sleep(self._rng.uniform(0.0, 5.0))
        self._machine.proxy.mend()

    def _cut_workers(self) -> None:
        """The workers keep running."""
        found = psutil.Process(self._one(_GATEWAY)).net_connections("tcp")
        own = {each.laddr.port for each in found if each.status == psutil.CONN_LISTEN}
        for each in found:
            if each.status == psutil.CONN_ESTABLISHED and each.laddr.port not in own:
                which = ["sport", "=", str(each.laddr.port), "dport", "=", str(each.raddr.port)]
                subprocess.run(["ss", "-K", "-t", *which], capture_output=True, check=True)


def _signal(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _output_of(pid: int) -> str:
    """Return a process's log path, or an empty string if it has ended."""
    try:
        return str(Path(f"/proc/{pid}/fd/1").readlink())
    except OSError:
        return ""


def _content(folder: Path) -> list[tuple[str, int]]:
    try:
        return sorted((each.name, each.stat().st_size) for each in os.scandir(folder))
    except OSError:
        return []
