"""The handshake of a launcher and a worker, before gRPC.

1. Launcher to worker: one `WorkerSpec` in JSON. It holds everything, including the secret of gRPC
   calls, so no argument or environment variable holds a secret.
2. Worker to launcher: `WorkerReport`s, one JSON object a line. The first gives the worker's
   address. If the worker cannot start or continue, a report with the error follows, and it exits
   with status 1.
3. The gRPC health service says NOT_SERVING from the first report on, and SERVING when the worker
   takes calls. Every call carries the secret in its metadata.
4. The lifeline is a connection that the launcher holds open. When it closes, the worker kills its
   whole process group. A worker without it has a `lifeline` in seconds, the longest time without a
   gateway's call.
5. To end a worker, the launcher sends SIGTERM, and SIGKILL after the stop timeout.

`worker_link` transports these messages."""

from __future__ import annotations

import ctypes
import os
import resource
import select
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from tandem import __version__
from tandem.errors import TandemError
from tandem.protocol.certificate import Certificate
from tandem.settings.requests import MOST_PAYLOAD_BYTES
from tandem.settings.sharing import Sharing
from tandem.settings.workers import SamplerSettings, TrainerSettings

WorkerKind = Literal["trainer", "sampler", "job"]

SECRET_METADATA_KEY = "x-tandem-worker-secret"

PROTOCOL = 1
"""The version of calls and specification. Gateways and workers refuse another one.

Raise it after a change that an older peer would misunderstand."""

PROTOCOL_METADATA_KEY, VERSION_METADATA_KEY = "tandem-protocol", "tandem-version"
"""Trailing metadata of a worker's health: its protocol and its `own_version`."""

OUT_OF_MEMORY_METADATA_KEY = "tandem-out-of-memory-at"
"""Trailing metadata of RESOURCE_EXHAUSTED: the tokens of the micro-batch that exceeded a trainer's
memory. The trainer ends."""

DEFECT_METADATA_KEY = "tandem-defect"
"""Trailing metadata of ABORTED: a program error ended the trainer and would end the next one
too."""

MAX_SPEC_BYTES = 16 * select.PIPE_BUF
"""The limit of a specification: the capacity of a pipe without a reader."""
SUPERVISOR_PID = "SUPERVISOR_PID"
"""The environment variable with the supervisor's pid, if there is one."""
COMPILED = "compiled"
"""The data directory's folder for workers' compiled code."""
LOOPBACK = "127.0.0.1"
MAX_MESSAGE_BYTES = 2**31 - 1
GRPC_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
]
MOST_REQUEST_BYTES: dict[WorkerKind, int] = {
    "trainer": MOST_PAYLOAD_BYTES + 64 * 2**20,
    "sampler": 64 * 2**20,
    "job": 2**20,
}
"""The largest request by kind of worker: a payload with its loss, or a prompt with its targets. A
job answers only health checks."""
SERVER_OPTIONS: list[tuple[str, int]] = [
    # Callers without the secret can connect too. These options limit their memory: a window that
    # grows with the bandwidth takes megabytes per connection. A request gets a window of its size
    # when a handler reads it.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.max_allowed_incoming_connections", 256),
    # By default gRPC lets other programs listen on its port too.
    ("grpc.so_reuseport", 0),
]
"""Options of a worker's or an agent's gRPC server."""


# --- Messages -----------------------------------------------------------------------------------


LORA_FLAGS = {"attention": "train_attn", "mlp": "train_mlp", "unembedding": "train_unembed"}
"""The argument of `create_lora_training_client` for each kind of layers."""


class LoraSpec(BaseModel):
    """Low-rank adapters (Hu et al., arXiv 2106.09685) on the chosen kinds of layers.

    The update of a matrix is alpha / rank times B·A. A is drawn from the seed, and B starts at
    zero."""

    model_config = ConfigDict(frozen=True)

    rank: int = Field(32, ge=1, le=512)
    alpha: float = Field(32.0, gt=0)
    seed: int = 0
    attention: bool = True
    mlp: bool = True
    unembedding: bool = True


@dataclass(frozen=True)
class StateBytes:
    """Bytes per trained parameter: weight, gradient, and all moments."""

    weight: int
    gradient: int
    moments: int


class Layout(BaseModel):
    """The division of a model among a trainer's ranks.

    There are `replicas` of the model, each on consecutive ranks. Within a replica, groups of
    `tensor_parallel` consecutive ranks divide the matrices and compute the same datums together.
    FSDP shards over the replica's other ranks. Example: of 8 ranks, `Layout(replicas=2,
    tensor_parallel=2)` gives ranks 0 to 3 a quarter each, and ranks 4 to 7 those quarters again.
    Ranks 0 and 1 compute the same datums."""

    model_config = ConfigDict(frozen=True)

    replicas: int = Field(1, ge=1)
    tensor_parallel: int = Field(1, ge=1)

    def shards(self, ranks: int) -> int:
        """Return a replica's FSDP shards on `ranks` ranks. Raises `ValueError`."""
        if ranks % (self.replicas * self.tensor_parallel):
            raise ValueError(
                f"{ranks} ranks cannot be divided into {self.replicas} replicas, and those among "
                f"{self.tensor_parallel} ranks that compute together"
            )
        return ranks // (self.replicas * self.tensor_parallel)

    def shares(self, ranks: int) -> int:
        """Return the parts of a batch: one per group of ranks that compute together."""
        return ranks // self.tensor_parallel


class TrainingSpec(BaseModel):
    """The trained parameters of a run, fixed at its creation.

    `lora` None means all parameters. `states` is the dtype of weights, gradients and moments.
    Adapters and dimuon always use float32. `offload` moves state of a GPU to host memory: the
    moments, or the weights with gradients and moments, which return a few blocks at a time. With
    adapters, it moves the frozen weights."""

    model_config = ConfigDict(frozen=True)

    lora: LoraSpec | None = None
    optimizer: Literal["adamw", "dimuon"] = "adamw"
    states: Literal["float32", "bfloat16"] = "float32"
    offload: Literal["none", "moments", "weights"] = "none"
    layout: Layout = Layout()

    @property
    def rank(self) -> int:
        return self.lora.rank if self.lora is not None else 0

    @property
    def weights_on_host(self) -> bool:
        return self.offload == "weights"

    @property
    def moments_on_host(self) -> bool:
        return self.offload != "none" and self.lora is None

    @property
    def state_bytes(self) -> StateBytes:
        width = 2 if self.states == "bfloat16" else 4
        return StateBytes(weight=width, gradient=width, moments=2 * width)


class JobSpec(BaseModel):
    """The program of a job's worker, rendered by the gateway.

    `argv` is torchrun with the program and its arguments. `folder` is the job's folder, and
    `attempt` counts from 1. `environment` is added to the inherited variables."""

    model_config = ConfigDict(frozen=True)

    framework: str
    folder: str
    attempt: int = Field(1, ge=1)
    processes: int = Field(1, ge=1)
    argv: tuple[str, ...]
    environment: dict[str, str] = Field(default_factory=dict)


WORKER_STOP_TIMEOUT = 10.0


class WorkerSpec(BaseModel):
    """The specification of a worker.

    Example: `{"worker_id": "trainer-s-ab12-0", "kind": "trainer", "secret": "…", "model_name":
    "tiny", "model_path": "models/tiny", "run_id": "s-ab12:train:0", "session_id": "s-ab12"}`.

    - `run_id`: the run of a trainer's creation. `first_run`: its first run, if another.
    - `replica`: the number of an engine in its sampler, from 0.
    - `training`: for trainers. None means all parameters by AdamW.
    - `devices`: one per rank, such as "cpu:0-3" (cores) or "cuda:0". The worker sees no others.
      Empty means the whole machine.
    - `lease`: the fencing token at the start. 0: not leased, and always awake.
    - `no_suspender`: the reason why the host cannot suspend a leased worker.
    - `nodes`: a trainer's hosts. Each has equally many ranks, in the order of `devices`, and gets
      this specification. `rendezvous` is node 0's HOST:PORT.
    - `group`: the device group of its place, and the `sharing` of its devices. `host_memory`: its
      session's need on each host, in bytes, 0 if unknown.
    - `host`, `port`, `metrics_port`: its address. Port 0 means any free one. Without its
      certificate `tls`, it listens only on loopback.
    - `lifeline`: the longest time without a gateway's call, in seconds. 0 means that the launcher
      holds a connection.
    - `start_timeout`: seconds until its address, and then until it serves. `stop_timeout`: seconds
      from SIGTERM to SIGKILL."""

    # An error must not quote its input, because the secret would reach the log.
    model_config = ConfigDict(frozen=True, hide_input_in_errors=True)

    protocol: int = PROTOCOL
    worker_id: str
    kind: WorkerKind
    secret: str = Field(repr=False)
    model_name: str
    model_path: str
    session_id: str
    run_id: str = ""
    first_run: str = ""
    replica: int = 0
    training: TrainingSpec | None = None
    devices: tuple[str, ...] = ()
    lease: int = 0
    no_suspender: str = ""
    nodes: int = Field(1, ge=1)
    rendezvous: str = ""
    group: str = ""
    sharing: Sharing = Sharing.TIME_SLICE
    host_memory: int = 0
    host: str = LOOPBACK
    port: int = Field(0, ge=0, le=65535)
    metrics_port: int = Field(0, ge=0, le=65535)
    tls: Certificate | None = None
    lifeline: float = Field(0.0, ge=0)
    log_level: str = "info"
    start_timeout: float = 300.0
    stop_timeout: float = WORKER_STOP_TIMEOUT
    trainer: TrainerSettings | None = None
    sampler: SamplerSettings | None = None
    job: JobSpec | None = None

    @model_validator(mode="after")
    def _listens_to_others_with_tls_alone(self) -> WorkerSpec:
        if self.host != LOOPBACK and self.tls is None:
            raise ValueError("a worker that others can reach needs a certificate (tls)")
        return self

    @property
    def framework(self) -> str:
        """A trainer's backend, a job's framework, or the sampler's engine."""
        if self.job is not None:
            return self.job.framework
        return self.trainer.backend if self.trainer is not None else "vllm"


class WorkerReport(BaseModel):
    """A worker's address, or the reason why it does not serve."""

    model_config = ConfigDict(frozen=True)

    address: str = ""
    metrics_port: int = 0
    error_type: str = ""
    error: str = ""

    @classmethod
    def of_error(cls, error: TandemError) -> WorkerReport:
        return cls(error_type=error.type, error=error.message)


# --- A launcher's view of a worker --------------------------------------------------------------


@dataclass(frozen=True)
class WorkerHandle:
    """A worker that has bound its ports. The secret is never printed.

    Example: `WorkerHandle(worker_id="trainer-s-ab12-0", kind="trainer", session_id="s-ab12",
    run_id="s-ab12:train:0", model_name="tiny", model_path="models/tiny", max_lora_rank=0,
    address="127.0.0.1:40123", metrics_port=40124, secret="s3")`."""

    worker_id: str
    kind: WorkerKind
    session_id: str
    run_id: str
    model_name: str
    model_path: str
    max_lora_rank: int
    address: str
    metrics_port: int
    secret: str = field(repr=False)
    replica: int = 0
    authority: str = field(default="", repr=False)
    """The authority's certificate in PEM, or "" for calls without TLS."""
    pid: int = 0
    log_path: str = ""
    """For people: its process on its host, and its log file. A pod has neither."""

    @classmethod
    def of(
        cls,
        spec: WorkerSpec,
        *,
        address: str,
        metrics_port: int = 0,
        pid: int = 0,
        log_path: str = "",
    ) -> WorkerHandle:
        return cls(
            worker_id=spec.worker_id,
            kind=spec.kind,
            session_id=spec.session_id,
            run_id=spec.run_id,
            model_name=spec.model_name,
            model_path=spec.model_path,
            max_lora_rank=spec.sampler.max_lora_rank if spec.sampler is not None else 0,
            address=address,
            metrics_port=metrics_port,
            secret=spec.secret,
            replica=spec.replica,
            authority=spec.tls.authority if spec.tls is not None else "",
            pid=pid,
            log_path=log_path,
        )


@dataclass(frozen=True)
class WorkerExit:
    """The unrequested end of a worker. `reason` is one sentence for the client. A worker `crashed`
    if a fault in native code ended it."""

    worker_id: str
    reason: str
    crashed: bool = False


# --- Shared by all processes --------------------------------------------------------------------

_LIBC = ctypes.CDLL(None, use_errno=True)


def own_version() -> str:
    """Return this process's version, with the image's tag if it differs: "0.2.0 (image
    2026-11-23)"."""
    image = os.environ.get("TANDEM_IMAGE_VERSION", "")
    return __version__ if image in ("", __version__) else f"{__version__} (image {image})"


def set_process_limits() -> None:
    """Set the process limits that child processes inherit.

    New files are readable only by their owner. There are no core dumps, because they would contain
    secrets. The limit of open files, usually 1024, is raised, because each connection is one."""
    os.umask(0o077)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    most_files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))


def compile_caches(data_dir: Path) -> dict[str, str]:
    """Return the variables that keep torch's and vLLM's compiled code in the data directory."""
    folder = data_dir / COMPILED
    return {"TORCHINDUCTOR_CACHE_DIR": str(folder), "VLLM_CACHE_ROOT": str(folder / "vllm")}


def die_with_parent(parent_pid: int | None = None) -> None:
    """Let the kernel kill this process when the thread that started it ends.

    Child processes of a worker, such as ranks, call it first. If the worker, `parent_pid`, has
    ended already, this process kills itself. A worker's own first process must not use it: it would
    die before its lifeline could end its children."""
    pr_set_pdeathsig = 1
    if _LIBC.prctl(pr_set_pdeathsig, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) was refused")
    if parent_pid is not None and os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)


def become_subreaper() -> None:
    """Let orphans below this process become its children, so that it finds them."""
    pr_set_child_subreaper = 36
    if _LIBC.prctl(pr_set_child_subreaper, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) was refused")


def end_with_supervisor() -> None:
    """End this gateway or agent with its supervisor, even if that has already ended. Call it
    first."""
    if pid := os.environ.pop(SUPERVISOR_PID, ""):  # children do not inherit it
        die_with_parent(int(pid))
