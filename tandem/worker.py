"""How a launcher and a worker process talk before gRPC does: specification, report, lifeline.

A worker is started as `python -m trainer_service` (or `sampler_service`) in a process group
of its own. On its standard input it gets one line of JSON, the `WorkerSpec`, the secret
included (so that no argument and no environment holds it), and then nothing more: the pipe
stays open as a lifeline, and when it closes, because the launcher ended in whatever way, the
worker kills its whole process group. On the file descriptor named by `--report-fd` the worker
writes JSON lines: first where it listens, as soon as it has bound its port, and, if it cannot
start, the error. From then on readiness is what its gRPC health service says.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from typing import BinaryIO, Literal

from pydantic import BaseModel, ConfigDict, Field

from tandem.settings import SamplerSettings, TrainerSettings

WorkerKind = Literal["trainer", "sampler"]

SECRET_METADATA_KEY = "x-tandem-worker-secret"
"""The gRPC metadata key under which every call carries the worker's secret."""

MAX_MESSAGE_BYTES = 2**31 - 1
GRPC_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
]


class WorkerSpec(BaseModel):
    """What a launcher is to start, and all that the worker is told.

    Literal example: `{"worker_id": "trainer-s-ab12-0", "kind": "trainer", "secret": "…",
    "model_name": "tiny", "model_path": "models/tiny", "data_dir": ".tandem", "run_id":
    "s-ab12:train:0", "session_id": "s-ab12", "fencing_token": 1}`.
    """

    model_config = ConfigDict(frozen=True)

    worker_id: str
    kind: WorkerKind
    secret: str = Field(repr=False)
    model_name: str
    model_path: str
    data_dir: str
    session_id: str
    run_id: str = ""
    fencing_token: int = 1
    host: str = "127.0.0.1"
    log_level: str = "info"
    trainer: TrainerSettings | None = None
    sampler: SamplerSettings | None = None


class WorkerReport(BaseModel):
    """One line from a worker to its launcher: an address, or why there is none."""

    model_config = ConfigDict(frozen=True)

    address: str = ""
    metrics_port: int = 0
    pid: int = 0
    error_type: str = ""
    error: str = ""


def read_spec(stream: BinaryIO | None = None) -> WorkerSpec:
    """Reads the specification, which is the first line of the standard input."""
    line = (stream or sys.stdin.buffer).readline()
    return WorkerSpec.model_validate_json(line)


def send_report(fd: int, report: WorkerReport) -> None:
    os.write(fd, report.model_dump_json().encode() + b"\n")


def die_with_parent() -> None:
    """Asks the kernel to kill this process when the thread that started it ends (Linux)."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL)


def hold_lifeline(fd: int = 0) -> None:
    """Kills our whole process group once the launcher's end of standard input has closed.

    Call it after `read_spec`. It covers the children of libraries, too (vLLM's engine
    processes), which a parent-death signal on one process would leave behind.
    """

    def wait() -> None:
        while os.read(fd, 4096):  # not sys.stdin: its lock would get in the way of a normal exit
            pass
        os.killpg(os.getpgid(0), signal.SIGKILL)

    threading.Thread(target=wait, name="lifeline", daemon=True).start()
