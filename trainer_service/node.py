"""`python -m trainer_service.node --spec-file FILE`: a trainer's node other than node 0.

It starts its ranks, joins node 0 and follows it until the worker ends. After a failure its status
is 1, and the reason is in its log and in `--report-file`. FILE is the `WorkerSpec` of all nodes.

A launcher of several nodes sets:
- In the specification: `nodes`, the number of all ranks as `trainer.ranks`, node 0's HOST:PORT as
  `rendezvous`, and the devices of all ranks, if any, in the nodes' order. HOST must resolve even
  before node 0 is ready (on Kubernetes, a headless Service with `publishNotReadyAddresses`).
- In the environment of each node but node 0: `TANDEM_NODE_RANK`, 1, 2, ….
- Between the nodes: node 0 takes connections at the port of `rendezvous`, and all ranks at ports
  that the kernel chooses. Models and data directory have one path on all nodes."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

from tandem.errors import TandemError
from tandem.protocol.devices import devices_of_ranks
from tandem.protocol.worker import WorkerReport, WorkerSpec
from tandem.protocol.worker_link import launcher_link
from tandem.telemetry import configure_logging, get_log
from trainer_service.compute.topology import Topology, node_number, topology_of
from trainer_service.service.libraries import set_environment
from trainer_service.service.nodes import Member


class _Stopped(Exception):
    pass


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
        link.report(WorkerReport.of_error(error))
        sys.exit(1)


def _follow(spec: WorkerSpec, topology: Topology) -> None:
    devices = devices_of_ranks(spec.devices, ranks=topology.ranks)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stop)
    member = Member(spec, topology, devices=devices)
    reason = "it failed"
    try:
        member.follow_first_node()
        reason = ""
    except TandemError as error:
        reason = error.message
        raise
    except _Stopped as stopped:
        reason = f"it was stopped by {stopped}"
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        member.end_worker(reason)


def _stop(number: int, _frame: FrameType | None) -> None:
    raise _Stopped(signal.Signals(number).name)


if __name__ == "__main__":
    main()
