"""The processes of ranks other than 0: starting and watching them, and their own program.

They are forked after torch and transformers are imported. A rank reads its assignment, one line of
JSON, from its standard input, which then stays open as its lifeline.

A failed rank writes a `RankReport` to another pipe, and waits to be killed. If it ended at once,
its peers would fail too, and rank 0 might end before it has read the report."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkProcess

from tandem.errors import WorkerStartFailed, describe
from tandem.protocol.devices import Device, confine
from tandem.protocol.worker import die_with_parent
from tandem.protocol.worker_link import hold_lifeline
from trainer_service.service.deaths import Death, RankReport
from trainer_service.service.libraries import import_before_forks

_KILLED_SECONDS = 10.0
_REPORTED_SECONDS = 60.0
"""A rank that has reported its error ends by itself after this time."""


@dataclass(frozen=True, kw_only=True)
class _Rank:
    """`assignment` and `report` are the parent's ends of the rank's pipes."""

    process: ForkProcess
    assignment: int
    report: int


class RankProcesses:
    """The `ranks` of this node, without rank 0.

    Create it in the main thread, with which they die, before other threads hold locks, because it
    forks. `on_death` is called from a thread for each rank that ends by itself."""

    def __init__(
        self,
        *,
        ranks: Iterable[int],
        devices: Sequence[Device],
        on_death: Callable[[Death], None],
    ) -> None:
        """Raises `WorkerStartFailed`."""
        self._on_death = on_death
        self._stopping = False
        self._ranks: dict[int, _Rank] = {}
        self._watchers: list[threading.Thread] = []
        try:
            for rank in ranks:
                self._ranks[rank] = _fork(rank, devices[rank] if devices else None)
        except BaseException as error:
            self.kill()  # at its end this process would wait for them, and they for it
            if isinstance(error, OSError):
                raise WorkerStartFailed(
                    f"the process of rank {rank} cannot be made: {describe(error)}; raise the "
                    "bound on processes (`ulimit -u`, or the cgroup's pids.max)"
                ) from error
            raise
        self._watchers = [
            threading.Thread(target=self._watch, args=item, name=f"watch-{item[0]}", daemon=True)
            for item in self._ranks.items()
        ]
        for watcher in self._watchers:
            watcher.start()

    def assign(self, rank: int, line: str) -> None:
        try:
            with os.fdopen(self._ranks[rank].assignment, "wb", closefd=False) as pipe:
                pipe.write(line.encode() + b"\n")
        except BrokenPipeError:
            return  # it has died, and its watcher reports how

    def kill(self) -> None:
        self._stopping = True
        for rank in self._ranks.values():
            rank.process.kill()
        for watcher in self._watchers:
            watcher.join(_KILLED_SECONDS)

    def _watch(self, number: int, rank: _Rank) -> None:
        with os.fdopen(rank.report, "rb") as pipe:
            said = pipe.read()
        if said and not self._stopping:  # it waits to be killed
            report = RankReport.model_validate_json(said)
            self._on_death(Death(rank=number, returncode=1, report=report))
        rank.process.join()
        if not said and not self._stopping:
            returncode = rank.process.exitcode
            assert returncode is not None
            self._on_death(Death(rank=number, returncode=returncode))


def _fork(number: int, device: Device | None) -> _Rank:
    import_before_forks()
    assignment, ours = os.pipe()
    report, theirs = os.pipe()
    process = multiprocessing.get_context("fork").Process(
        target=_run, args=(os.getpid(), assignment, theirs, device), name=f"rank-{number}"
    )
    process.start()
    os.close(assignment)
    os.close(theirs)
    return _Rank(process=process, assignment=ours, report=report)


def _run(parent: int, assignment: int, report: int, device: Device | None) -> None:
    die_with_parent(parent)
    # Rank 0 stops us. A signal to the whole process group must not look like our own death.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Close rank 0's other files: a pipe open here too would not close with rank 0.
    os.dup2(assignment, 0)
    os.closerange(3, report)
    os.closerange(report + 1, os.sysconf("SC_OPEN_MAX"))
    faulthandler.enable()
    try:
        if device is not None:
            confine(device)
        from trainer_service.compute.process_group import Assignment, join
        from trainer_service.service.hosted_runs import FollowedRuns

        with os.fdopen(0, "rb", closefd=False) as pipe:
            line = pipe.readline()
        if not line:
            os._exit(1)
        hold_lifeline()
        FollowedRuns(join(Assignment.model_validate_json(line))).follow()
    except BaseException as error:  # noqa: BLE001 - the process ends on any error
        os.write(report, RankReport.of_error(error).model_dump_json().encode())
        os.close(report)
        traceback.print_exc()
        sys.stderr.flush()
        time.sleep(_REPORTED_SECONDS)
        os._exit(1)  # at once: a thread may still write a snapshot
