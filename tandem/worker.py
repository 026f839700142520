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
import fcntl
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
    ("grpc.enable_http_proxy", 0),  # the environment's proxy is not for our own workers
]


class LoraSpec(BaseModel):
    """Low-rank adapters (Hu et al., arXiv 2106.09685) on the chosen kinds of layers: the update
    of a matrix is alpha / rank times B·A, with A from the seed and B zero at the start."""

    model_config = ConfigDict(frozen=True)

    rank: int = Field(32, ge=1, le=512)
    alpha: float = Field(32.0, gt=0)
    seed: int = 0
    attention: bool = True
    mlp: bool = True
    unembedding: bool = True


class TrainingSpec(BaseModel):
    """What a run trains, fixed when it is created. `lora` None: all parameters."""

    model_config = ConfigDict(frozen=True)

    lora: LoraSpec | None = None
    optimizer: Literal["adamw", "dimuon"] = "adamw"

    @property
    def rank(self) -> int:
        """That of its adapters; 0 where it trains all parameters."""
        return self.lora.rank if self.lora is not None else 0


class WorkerSpec(BaseModel):
    """What a launcher is to start, and all that the worker is told.

    Literal example: `{"worker_id": "trainer-s-ab12-0", "kind": "trainer", "secret": "…",
    "model_name": "tiny", "model_path": "models/tiny", "run_id":
    "s-ab12:train:0", "session_id": "s-ab12"}`. `training` is for a
    trainer, and None there means all parameters by AdamW.
    """

    # An error must not quote its input: the secret would be in the log.
    model_config = ConfigDict(frozen=True, hide_input_in_errors=True)

    worker_id: str
    kind: WorkerKind
    secret: str = Field(repr=False)
    model_name: str
    model_path: str
    session_id: str
    run_id: str = ""
    training: TrainingSpec | None = None
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
    line = report.model_dump_json().encode() + b"\n"
    while line:  # a signal can cut a write to a pipe short
        line = line[os.write(fd, line) :]


def die_with_parent(parent_pid: int | None = None) -> None:
    """Asks the kernel to kill this process when the thread that started it ends (Linux).

    For the processes that a worker starts, such as ranks: its first act, with the pid of the
    worker, because a worker that ended before the request was made gives no signal any more.
    Not for the worker's own first process: killed before its lifeline could act, it would
    leave its children behind.
    """
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        if ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) was refused")
    if parent_pid is not None and os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)


def hold_lifeline(fd: int = 0) -> None:
    """Kills our whole process group once the launcher's end of standard input has closed.

    Call it after `read_spec` and before any slow import. It covers the children of libraries,
    too (vLLM's engine processes), which a parent-death signal on one process would leave
    behind. In a process that does not lead its group, such as one started by hand in a
    script, it ends that process alone.
    """
    leads = os.getpgrp() == os.getpid()
    if leads:
        _arm_kernel(fd)

    def wait() -> None:
        try:
            while os.read(fd, 4096):  # not sys.stdin: its lock gets in the way of a normal exit
                pass
        except OSError:  # a reset socket, a hung-up terminal: the launcher is as gone as at an end
            pass
        if leads:
            os.killpg(os.getpid(), signal.SIGKILL)
        else:
            os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name="lifeline", daemon=True).start()


def _arm_kernel(fd: int) -> None:
    """Lets the kernel itself kill the group when the pipe closes (Linux, see fcntl(2)).

    The thread needs Python's interpreter lock for that, which a native call may hold for long
    or, in a deadlock, for ever. The thread stays for the other systems, and for a pipe that
    had closed before this call, which causes no event.
    """
    if sys.platform != "linux":
        return
    f_setsig = 10
    try:
        fcntl.fcntl(fd, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(fd, f_setsig, signal.SIGKILL)
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)
    except OSError:  # standard input is of a kind without such events: the thread is enough
        return
