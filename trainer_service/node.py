"""`python -m trainer_service.node --spec-file FILE`: a trainer's node other than node 0.

It starts its ranks, joins node 0 and follows it until the worker ends; then it exits with status 0,
or 1 if the worker failed, with the reason in its log and in `--report-file`, if there is one. FILE
is the same `WorkerSpec` as that of node 0, which is `python -m trainer_service --spec-file FILE`.
What a launcher sets for a trainer with several nodes:

- in the specification: `nodes`, the ranks of all nodes together as `trainer.ranks`, the HOST:PORT
  of node 0 as `rendezvous`, and the devices of all ranks, if any, in the nodes' order. The name of
  HOST must resolve as soon as node 0 runs, ready or not. On Kubernetes a headless Service with
  `publishNotReadyAddresses` does that;
- in the environment of each node but node 0: `TANDEM_NODE_RANK`, 1, 2, …;
- between the nodes: node 0 takes connections at the port of `rendezvous`, and all ranks at ports
  that the kernel chooses. The models and the data directory are mounted at one path on all nodes.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

from tandem.errors import TandemError
from tandem.protocol.worker import WorkerReport, WorkerSpec
from tandem.protocol.worker_link import launcher_link
from tandem.telemetry import configure_logging, get_log
from trainer_service.compute.topology import Topology, node_number, topology_of
from trainer_service.service.libraries import set_environment
from trainer_service.service.nodes import Member
from trainer_service.service.rank_processes import devices_of_ranks


class _Stopped(Exception):
    """SIGTERM or SIGINT came."""


def main() -> None:
    link = launcher_link()
    set_environment()
    link.preload(lambda: None)
    spec = link.read_spec()
    configure_logging(service="trainer", level=spec.log_level)
    try:
        topology = topology_of(spec, node=node_number(os.environ))
        link.hold_lifeline()
        _follow(spec, topology)
    except TandemError as error:
        log = get_log(worker_id=spec.worker_id, session_id=spec.session_id)
        log.error("node_failed", error_type=error.type, error=error.message)
        link.report(WorkerReport(error_type=error.type, error=error.message, pid=os.getpid()))
        sys.exit(1)


def _follow(spec: WorkerSpec, topology: Topology) -> None:
    """Raises `TandemError` if the worker fails."""
    devices = devices_of_ranks(spec.devices, ranks=topology.ranks)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stop)
    member = Member(spec, topology, devices=devices)
    reason = "it failed"
    try:
        member.run()
        reason = ""
    except TandemError as error:
        reason = error.message
        raise
    except _Stopped as stopped:
        reason = f"it was stopped by {stopped}"
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        member.end(reason)


def _stop(number: int, _frame: FrameType | None) -> None:
    raise _Stopped(signal.Signals(number).name)


if __name__ == "__main__":
    main()
