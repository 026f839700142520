"""Starts a real trainer or sampler process, and waits until it serves."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem.agent.pool import default_command
from tandem.agent.worker_process import kill_group
from tandem.protocol.fencing import LEASE_METADATA_KEY
from tandem.protocol.worker import GRPC_OPTIONS, SECRET_METADATA_KEY, WorkerReport, WorkerSpec

SECRET = "a secret of this test"
SESSION = "s-0123456789ab"
RUN = f"{SESSION}:train:0"
START_SECONDS = 240.0
CALL_SECONDS = 120.0


@dataclass
class Started:
    """A process with a reported address."""

    process: subprocess.Popen[bytes]
    reports: Any
    report: WorkerReport
    spec: WorkerSpec | None = None

    def next_report(self) -> WorkerReport:
        return WorkerReport.model_validate_json(self.reports.readline())


class WorkerClient:
    """A channel to a worker during a `with` block. An open channel would retry for ever."""

    def __init__(self, started: Started) -> None:
        self.process = started.process
        self.report = started.report
        self.next_report = started.next_report
        self.channel = _channel(started.report.address, started.spec)
        self.metadata: tuple[tuple[str, str], ...] = ((SECRET_METADATA_KEY, SECRET),)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.channel.close()

    def hold(self, lease: int) -> None:
        self.metadata = ((SECRET_METADATA_KEY, SECRET), (LEASE_METADATA_KEY, str(lease)))

    def wait_until_serving(self, seconds: float = START_SECONDS) -> None:
        stub = health_pb2_grpc.HealthStub(self.channel)
        for reply in stub.Watch(
            health_pb2.HealthCheckRequest(),
            metadata=self.metadata,
            timeout=seconds,
            wait_for_ready=True,
        ):
            if reply.status == health_pb2.HealthCheckResponse.SERVING:
                return


def _channel(address: str, spec: WorkerSpec | None) -> grpc.Channel:
    if spec is None or spec.tls is None:
        return grpc.insecure_channel(address, options=GRPC_OPTIONS)
    credentials = grpc.ssl_channel_credentials(spec.tls.authority.encode())
    named = ("grpc.ssl_target_name_override", spec.worker_id)
    return grpc.secure_channel(address, credentials, options=[*GRPC_OPTIONS, named])


@contextmanager
def worker_process(spec: WorkerSpec, *, prefix: Sequence[str] = ()) -> Iterator[Started]:
    """Start a worker in a new process group, which is killed at the end. `prefix` runs it
    elsewhere."""
    read, write = os.pipe()
    process = subprocess.Popen(
        [*prefix, *default_command(spec.kind), "--report-fd", str(write)],
        stdin=subprocess.PIPE,
        pass_fds=(write,),
        start_new_session=True,
    )
    os.close(write)
    assert process.stdin is not None
    try:
        process.stdin.write(spec.model_dump_json().encode() + b"\n")
        process.stdin.flush()
        with os.fdopen(read, "rb") as reports:
            report = WorkerReport.model_validate_json(reports.readline())
            yield Started(process, reports, report, spec)
    finally:
        kill_group(process.pid)
        process.wait(timeout=CALL_SECONDS)
        process.stdin.close()
