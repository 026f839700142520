"""`python -m trainer_service.node --spec-file FILE`: a trainer's node other than node 0.

It starts its ranks, joins node 0 and follows it until the worker ends; then it exits with status 0,
or 1 if the worker failed, with the reason in its log. FILE is the same `WorkerSpec` as that of node
0, which is `python -m trainer_service`. What a launcher sets for a trainer with several nodes:

- in the specification: `nodes`; `trainer.ranks`, of all nodes together; `rendezvous`, the HOST:PORT
  of node 0, whose name need not resolve before node 0 runs, but has to as soon as it does, ready
  or not (on Kubernetes: a headless Service with `publishNotReadyAddresses`); `devices`, if any, of
  all ranks in the nodes' order;
- in the environment of each node but node 0: `TANDEM_NODE_RANK`, 1, 2, … (or what else
  `trainer_service/compute/topology.py` understands);
- between the nodes: node 0 takes connections at the port of `rendezvous`, and all ranks at ports
  that the kernel chooses. The models and the data directory are mounted at one path on all nodes.

On node 0 it is `python -m trainer_service`, so that all nodes may have one command.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path
from types import FrameType

from tandem.errors import TandemError
from tandem.telemetry import configure_logging, get_log
from tandem.worker import WorkerSpec, set_process_limits
from trainer_service.compute.topology import Topology, topology_of
from trainer_service.service.nodes import Member
from trainer_service.service.rank_processes import devices_of_ranks


class _Stopped(Exception):
    """SIGTERM or SIGINT came."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--spec-file", type=Path, required=True, help="the worker's specification")
    spec = WorkerSpec.model_validate_json(parser.parse_known_args()[0].spec_file.read_bytes())
    configure_logging(service="trainer", level=spec.log_level)
    log = get_log(worker_id=spec.worker_id, session_id=spec.session_id)
    try:
        topology = topology_of(spec, os.environ)
        if topology.node:
            _follow(spec, topology)
    except TandemError as error:
        log.error("node_failed", error_type=error.type, error=error.message)
        sys.exit(1)
    if not topology.node:
        from trainer_service.__main__ import main as worker

        worker()


def _follow(spec: WorkerSpec, topology: Topology) -> None:
    """Raises `TandemError` if the worker fails."""
    set_process_limits()
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as in `__main__`
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
