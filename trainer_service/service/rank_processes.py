"""The processes of ranks other than 0: how their node starts and watches them, and their program.

`python -m trainer_service.service.rank_processes` is one such rank, confined to its device if it is
given one. It reads its assignment, which rank 0 made, as one line of JSON on standard input, which
then stays open as its lifeline; it follows rank 0 until it is killed. If anything fails it writes a
`RankReport` to the given descriptor and exits: a process group that lost a rank is of no use.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Sequence

from tandem.devices import Device, confine, parse_device
from tandem.errors import InvalidRequest, WorkerStartFailed
from tandem.worker import die_with_parent
from tandem.worker_link import hold_lifeline
from trainer_service.service.deaths import Death, RankReport
from trainer_service.service.libraries import import_libraries


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


class RankProcesses:
    """The `ranks` of this node, less rank 0. Start them from the main thread: they die with the
    thread that did.

    `devices` are those of the trainer's ranks, or none. `on_death` is called from a thread with
    each that ends by itself.
    """

    def __init__(
        self,
        *,
        ranks: Iterable[int],
        devices: Sequence[Device],
        on_death: Callable[[Death], None],
    ) -> None:
        self._on_death = on_death
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._reports: dict[int, int] = {}
        self._stopping = False
        for rank in ranks:
            self._start(rank, str(devices[rank]) if devices else "")
        for rank in self._processes:
            threading.Thread(
                target=self._watch, args=(rank,), name=f"watch-{rank}", daemon=True
            ).start()

    def _start(self, rank: int, device: str) -> None:
        read, write = os.pipe()
        self._processes[rank] = subprocess.Popen(
            [sys.executable, "-m", __name__, "--report-fd", str(write), "--device", device],
            stdin=subprocess.PIPE,
            pass_fds=(write,),
        )
        os.close(write)
        self._reports[rank] = read

    def assign(self, rank: int, line: str) -> None:
        """Sends a rank its assignment. The pipe stays open: it is the rank's lifeline."""
        stdin = self._processes[rank].stdin
        assert stdin is not None
        try:
            stdin.write(line.encode() + b"\n")
            stdin.flush()
        except BrokenPipeError:
            return  # it has died; its watcher reports how

    def kill(self) -> None:
        """Kills them. They hold nothing that needs an orderly end."""
        self._stopping = True
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait(timeout=10)

    def _watch(self, rank: int) -> None:
        process, report = self._processes[rank], self._reports[rank]
        said = b""
        while part := os.read(report, 4096):
            said += part
        os.close(report)
        returncode = process.wait()
        if not self._stopping:
            why = RankReport.model_validate_json(said) if said else None
            self._on_death(Death(rank=rank, returncode=returncode, report=why))


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
    from trainer_service.batches.memory import MicroBatchTooLarge

    if isinstance(error, MicroBatchTooLarge):
        return RankReport(error=str(error), out_of_memory_at=error.tokens)
    return RankReport(error=f"{type(error).__name__}: {error}".splitlines()[0][:4000])


if __name__ == "__main__":
    main()
