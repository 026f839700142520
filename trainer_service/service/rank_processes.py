"""The processes of ranks other than 0: how rank 0 starts and watches them, and their program.

`python -m trainer_service.service.rank_processes` is one such rank, confined to its device if it is
given one. It reads its assignment as one line of JSON on standard input, which then stays open as
its lifeline; it follows rank 0 until it is killed. If anything fails it writes a `RankReport` to
the given descriptor and exits: a process group that lost a rank is of no use.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pydantic import BaseModel

from tandem.devices import Device, confine, parse_device
from tandem.errors import (
    InvalidRequest,
    OutOfMemory,
    TandemError,
    WorkerDied,
    WorkerStartFailed,
)
from tandem.worker import die_with_parent, hold_lifeline
from trainer_service.service.libraries import import_libraries

# A rank that dies breaks its peers' collectives, so that they die within moments of each other;
# the one that was killed is the cause.
_SETTLE_SECONDS = 0.2


def devices_of_ranks(names: Sequence[str], *, ranks: int) -> list[Device]:
    """Returns the device of each rank; none where the whole machine is theirs. Raises
    `WorkerStartFailed`."""
    try:
        devices = [parse_device(name) for name in names]
    except InvalidRequest as error:
        raise WorkerStartFailed(error.message) from error
    if devices and len(devices) != ranks:
        raise WorkerStartFailed(f"{ranks} ranks were given {len(devices)} devices, not one each")
    if len({device.kind for device in devices}) > 1:
        raise WorkerStartFailed(
            f"ranks compute on devices of one kind, not on {', '.join(map(str, devices))}"
        )
    return devices


class RankReport(BaseModel):
    """Why a rank ends. `out_of_memory_at`: a micro-batch of so many tokens was too large for it;
    0: it is something else."""

    error: str
    out_of_memory_at: int = 0


@dataclass(frozen=True)
class _Death:
    """`report` None: the rank could not say why."""

    rank: int
    returncode: int
    report: RankReport | None

    @property
    def cause(self) -> TandemError:
        if self.returncode < 0:
            name = signal.Signals(-self.returncode).name
            return WorkerDied(f"rank {self.rank} was killed by {name}")
        if self.report is None:
            return WorkerDied(f"rank {self.rank} ended with exit code {self.returncode}")
        sentence = f"rank {self.rank} failed: {self.report.error}"
        if tokens := self.report.out_of_memory_at:
            return OutOfMemory(sentence, tokens=tokens)
        return WorkerDied(sentence)

    @property
    def likeliness(self) -> int:
        """How likely it is that this death made the other ranks fail."""
        if self.returncode < 0:
            return 2
        return int(self.report is not None and self.report.out_of_memory_at > 0)


class RankProcesses:
    """Ranks 1 … size-1. Start them from the main thread: they die with the thread that did.

    `devices` are those of all ranks, or none. `on_death` is called once, from a thread, with an
    error that names the rank to blame.
    """

    def __init__(
        self,
        *,
        size: int,
        devices: Sequence[Device],
        on_death: Callable[[TandemError], None],
    ) -> None:
        self._on_death = on_death
        self._processes: list[subprocess.Popen[bytes]] = []
        self._reports: list[int] = []
        self._deaths: list[_Death] = []
        self._changed = threading.Condition()
        self._stopping = False
        for rank in range(1, size):
            self._start(str(devices[rank]) if devices else "")
        for rank in range(1, size):
            threading.Thread(
                target=self._watch, args=(rank,), name=f"watch-{rank}", daemon=True
            ).start()

    def _start(self, device: str) -> None:
        read, write = os.pipe()
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, "--report-fd", str(write), "--device", device],
            stdin=subprocess.PIPE,
            pass_fds=(write,),
        )
        os.close(write)
        self._processes.append(process)
        self._reports.append(read)

    def assign(self, rank: int, line: str) -> None:
        """Sends a rank its assignment. The pipe stays open: it is the rank's lifeline."""
        stdin = self._processes[rank - 1].stdin
        assert stdin is not None
        try:
            stdin.write(line.encode() + b"\n")
            stdin.flush()
        except BrokenPipeError:
            return  # it has died; its watcher reports how

    def cause_of_death(self, *, timeout: float) -> TandemError | None:
        """Why the process group broke, or None if no rank dies within `timeout` seconds."""
        if not self._processes:
            return None
        with self._changed:
            if not self._changed.wait_for(lambda: bool(self._deaths), timeout):
                return None
        return self._cause()

    def kill(self) -> None:
        """Kills all ranks but 0. They hold nothing that needs an orderly end."""
        self._stopping = True
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait(timeout=10)

    def _watch(self, rank: int) -> None:
        process, report = self._processes[rank - 1], self._reports[rank - 1]
        said = b""
        while part := os.read(report, 4096):
            said += part
        os.close(report)
        returncode = process.wait()
        if self._stopping:
            return
        with self._changed:
            first = not self._deaths
            why = RankReport.model_validate_json(said) if said else None
            self._deaths.append(_Death(rank, returncode, why))
            self._changed.notify_all()
        if first:
            self._on_death(self._cause())

    def _cause(self) -> TandemError:
        """A rank killed by a signal, if there is one, else one that ran out of memory, else the
        first that died."""
        time.sleep(_SETTLE_SECONDS)
        with self._changed:
            return max(self._deaths, key=lambda death: death.likeliness).cause


def main() -> None:
    """The program of one rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--report-fd", type=int, required=True)
    parser.add_argument("--device", required=True, help="the only one that it sees; empty: all")
    arguments = parser.parse_args()
    report_fd: int = arguments.report_fd
    die_with_parent()
    faulthandler.enable()
    # Rank 0 stops us. A signal to the whole process group must not look like our own death.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        if arguments.device:
            confine(parse_device(arguments.device))
        import_libraries()  # while rank 0 does the same
        from trainer_service.compute.process_group import Assignment, join
        from trainer_service.service.hosted_runs import FollowedRuns

        line = sys.stdin.buffer.readline()
        if not line:
            os._exit(1)
        hold_lifeline()
        FollowedRuns(join(Assignment.model_validate_json(line))).follow()
    except BaseException as error:  # noqa: BLE001 - whatever it is, the process ends
        os.write(report_fd, _report_of(error).model_dump_json().encode())
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # at once: the others wait, and a snapshot may still be written in a thread


def _report_of(error: BaseException) -> RankReport:
    from trainer_service.compute.memory import MicroBatchTooLarge

    if isinstance(error, MicroBatchTooLarge):
        return RankReport(error=str(error), out_of_memory_at=error.tokens)
    return RankReport(error=f"{type(error).__name__}: {error}".splitlines()[0][:4000])


if __name__ == "__main__":
    main()
