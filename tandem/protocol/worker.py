"""The handshake of a launcher and a worker: what each tells the other before gRPC takes over.

1. Launcher to worker: one `WorkerSpec`, a JSON document. It is all that the worker is told, the
   secret of its gRPC calls included, so that no argument and no environment variable holds one.
2. Worker to launcher: `WorkerReport`s, one JSON object a line. The first says where the worker
   listens, as soon as it has bound its ports. One with an error follows when it cannot start, or
   cannot go on; then the worker exits with status 1.
3. Readiness is what the worker's gRPC health service says: NOT_SERVING from the first report on,
   SERVING once it takes calls. Every call, health included, carries the secret in its metadata.
4. The lifeline is a connection that the launcher keeps open while the worker should run. When it
   closes, for whatever reason, the worker kills its whole process group. A worker without such a
   connection has a `lifeline` of seconds, within which some gateway must have called it.
5. To end a worker, the launcher sends SIGTERM; what has not ended after the stop timeout is killed.

`WorkerSpec` and `WorkerReport` are what is said; how it travels is in `worker_link`.
"""

from __future__ import annotations

import ctypes
import os
import resource
import select
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from tandem import __version__
from tandem.protocol.certificate import Certificate
from tandem.settings.requests import MOST_PAYLOAD_BYTES
from tandem.settings.workers import SamplerSettings, TrainerSettings

WorkerKind = Literal["trainer", "sampler"]

SECRET_METADATA_KEY = "x-tandem-worker-secret"
"""The gRPC metadata key under which every call carries the worker's secret."""

PROTOCOL = 1
"""Of what gateway and workers say to each other: raised by a change of calls or of the
specification that the other side of before would misunderstand. They refuse one with another."""

PROTOCOL_METADATA_KEY, VERSION_METADATA_KEY = "tandem-protocol", "tandem-version"
"""The trailing metadata of a worker's health: its protocol, and its `own_version`."""

OUT_OF_MEMORY_METADATA_KEY = "tandem-out-of-memory-at"
"""The trailing metadata of RESOURCE_EXHAUSTED: how many tokens of a micro-batch were too many for
a trainer, which ends because of it."""

DEFECT_METADATA_KEY = "tandem-defect"
"""The trailing metadata of ABORTED where an error in its program ended a trainer, which would end
the next one, too."""

MAX_SPEC_BYTES = 16 * select.PIPE_BUF
"""Of the line of a specification: the capacity of a pipe that nobody reads yet."""
SUPERVISOR_PID = "SUPERVISOR_PID"
"""The variable that names the supervisor of a gateway or an agent; absent without one."""
COMPILED = "compiled"
"""The folder of the data directory for code that workers have compiled."""
LOOPBACK = "127.0.0.1"
MAX_MESSAGE_BYTES = 2**31 - 1
GRPC_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
]
MOST_REQUEST_BYTES: dict[WorkerKind, int] = {
    "trainer": MOST_PAYLOAD_BYTES + 64 * 2**20,
    "sampler": 64 * 2**20,
}
"""The largest request of each kind of worker: a payload with its loss, or the tokens of one prompt
with its targets, which came in a body of 16 MiB."""
SERVER_OPTIONS: list[tuple[str, int]] = [
    # Callers without the secret may connect, too: these bound the memory that they fill. A window
    # that grows with the bandwidth would hold megabytes for each of their connections. A request
    # that a handler reads is given a window of its own size.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.max_allowed_incoming_connections", 256),
    # gRPC would let other programs listen on its port, too.
    ("grpc.so_reuseport", 0),
]
"""Of the gRPC server of a worker or an agent."""


# --- What is said -----------------------------------------------------------------------------


LORA_FLAGS = {"attention": "train_attn", "mlp": "train_mlp", "unembedding": "train_unembed"}
"""By kind of layers, the argument of `create_lora_training_client` that chooses them."""


class LoraSpec(BaseModel):
    """Low-rank adapters (Hu et al., arXiv 2106.09685) on the chosen kinds of layers.

    The update of a matrix is alpha / rank times B·A, with A drawn from the seed and B zero at
    the start.
    """

    model_config = ConfigDict(frozen=True)

    rank: int = Field(32, ge=1, le=512)
    alpha: float = Field(32.0, gt=0)
    seed: int = 0
    attention: bool = True
    mlp: bool = True
    unembedding: bool = True


@dataclass(frozen=True)
class StateBytes:
    """The bytes of each parameter that is trained: the weight itself, its gradient, and all
    moments."""

    weight: int
    gradient: int
    moments: int


class Layout(BaseModel):
    """How the ranks of a trainer divide a model: there are so many `replicas` of it, each divided
    among ranks that follow each other. Of these, `tensor_parallel` that follow each other divide
    the matrices, and compute the same datums together; over the others, what they have is sharded.

    Literal example: of 8 ranks, `Layout(replicas=2, tensor_parallel=2)` lets ranks 0 to 3 hold a
    quarter each, and ranks 4 to 7 the same quarters; ranks 0 and 1 compute the same datums.
    """

    model_config = ConfigDict(frozen=True)

    replicas: int = Field(1, ge=1)
    tensor_parallel: int = Field(1, ge=1)

    def shards(self, ranks: int) -> int:
        """Among how many of the trainer's `ranks` FSDP shards a replica. Raises `ValueError`."""
        if ranks % (self.replicas * self.tensor_parallel):
            raise ValueError(
                f"{ranks} ranks cannot be divided into {self.replicas} replicas, and those among "
                f"{self.tensor_parallel} ranks that compute together"
            )
        return ranks // (self.replicas * self.tensor_parallel)

    def shares(self, ranks: int) -> int:
        """How many shares of a batch there are: one for all ranks that compute together."""
        return ranks // self.tensor_parallel


class TrainingSpec(BaseModel):
    """What a run trains, fixed at its creation: adapters, or all parameters (`lora` None).

    `states` is the type of weights, gradients and moments; adapters and dimuon have them in
    float32. `offload` says what is in the host's memory while the run computes on a GPU: its
    moments; or its weights, with their gradients and moments, of which a few blocks at a time are
    on the device. Of a run with adapters these are the frozen weights. `layout` says which ranks
    hold what.
    """

    model_config = ConfigDict(frozen=True)

    lora: LoraSpec | None = None
    optimizer: Literal["adamw", "dimuon"] = "adamw"
    states: Literal["float32", "bfloat16"] = "float32"
    offload: Literal["none", "moments", "weights"] = "none"
    layout: Layout = Layout()

    @property
    def rank(self) -> int:
        """The rank of its adapters; 0 when it trains all parameters."""
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


WORKER_STOP_TIMEOUT = 10.0
"""Seconds from SIGTERM to SIGKILL."""


class WorkerSpec(BaseModel):
    """What a launcher is to start.

    Literal example: `{"worker_id": "trainer-s-ab12-0", "kind": "trainer", "secret": "…",
    "model_name": "tiny", "model_path": "models/tiny", "run_id": "s-ab12:train:0", "session_id":
    "s-ab12"}`. `training` is for trainers; None means all parameters by AdamW. The timeouts, in
    seconds, are its launcher's: until it serves, and from SIGTERM to SIGKILL.

    `run_id` is the run that a trainer was made for, and `first_run` the one that it begins with; ""
    is the same one. `replica` says which of its sampler's engines it is, from 0. `devices` has
    one device for each rank, such as "cpu:0-3" (cores) or "cuda:0";
    the worker sees no others. Empty: the whole machine, as the settings choose. `lease` is the
    fencing token with which it starts, awake; 0: its group is not leased, and it is always awake.
    `no_suspender` says why the host cannot suspend a leased worker that does not know how to sleep:
    its launcher does.

    `nodes` is for trainers: on how many hosts its ranks are, equally many on each, in the order of
    `devices`. All nodes are started with this specification. `rendezvous` is the HOST:PORT at which
    the other nodes reach node 0; "" where there are none.

    `group` is the name of the device group that its place is on, and `host_memory` what its session
    said that it needs of each host, 0: nothing. It listens at `host`, on `port`
    and, for its metrics, on `metrics_port` (0: any free one), with the certificate of `tls`, or on
    loopback alone. `lifeline`: it ends when no gateway has called it for so many seconds; 0: its
    launcher holds another one.
    """

    # An error must not quote its input: the secret would be in the log.
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

    @model_validator(mode="after")
    def _listens_to_others_with_tls_alone(self) -> WorkerSpec:
        if self.host != LOOPBACK and self.tls is None:
            raise ValueError("a worker that others can reach needs a certificate (tls)")
        return self


class WorkerReport(BaseModel):
    """Where a worker listens, or why it does not or no longer serves."""

    model_config = ConfigDict(frozen=True)

    address: str = ""
    metrics_port: int = 0
    pid: int = 0
    error_type: str = ""
    error: str = ""


# --- What a launcher says of a worker ---------------------------------------------------------


@dataclass(frozen=True)
class WorkerHandle:
    """A worker that has bound its ports.

    Literal example: `WorkerHandle(worker_id="trainer-s-ab12-0", kind="trainer",
    session_id="s-ab12", run_id="s-ab12:train:0", model_name="tiny", model_path="models/tiny",
    max_lora_rank=0, address="127.0.0.1:40123", metrics_port=40124, secret="s3")`. The secret is
    never printed.
    """

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
    """In PEM, of the certificate that it has; "": it is called without TLS."""

    @classmethod
    def of(cls, spec: WorkerSpec, *, address: str, metrics_port: int = 0) -> WorkerHandle:
        """Return that of the worker with this specification."""
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
        )


@dataclass(frozen=True)
class WorkerDetails:
    """What a person may want to know of a running worker and not every launcher has: the process
    id on its host (0: none) and the file that its output goes to."""

    pid: int = 0
    log_path: Path | None = None


@dataclass(frozen=True)
class WorkerExit:
    """The unrequested end of a worker. `reason` is one sentence for the client."""

    worker_id: str
    reason: str


# --- What the processes have in common ---------------------------------------------------------

_LIBC = ctypes.CDLL(None, use_errno=True)


def own_version() -> str:
    """Return the version of Tandem in this process, and the tag that its image was built with where
    that is another. Literal example: "0.2.0 (image 2026-11-23)"."""
    image = os.environ.get("TANDEM_IMAGE_VERSION", "")
    return __version__ if image in ("", __version__) else f"{__version__} (image {image})"


def set_process_limits() -> None:
    """Make new files readable only by their owner, and write no core dumps, which would contain
    the secrets in memory. Allow many connections: each is an open file, and the usual soft limit
    is 1024. Child processes inherit all three."""
    os.umask(0o077)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    most_files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))


def compile_caches(data_dir: Path) -> dict[str, str]:
    """Return the variables that let torch and vLLM keep compiled code in the data directory."""
    folder = data_dir / COMPILED
    return {"TORCHINDUCTOR_CACHE_DIR": str(folder), "VLLM_CACHE_ROOT": str(folder / "vllm")}


def die_with_parent(parent_pid: int | None = None) -> None:
    """Ask the kernel to kill this process when the thread that started it ends (Linux).

    For processes that a worker starts, such as ranks, as their first act. `parent_pid` is that
    of the worker: one that ended before this call sends no signal any more, so the process ends
    itself. Not for the worker's own first process: killed before its lifeline could act, it would
    leave its children behind.
    """
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        if _LIBC.prctl(pr_set_pdeathsig, signal.SIGKILL) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) was refused")
    if parent_pid is not None and os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)


def end_with_supervisor() -> None:
    """End this process, a gateway or an agent, when its supervisor does, also if that was before.
    To be called first."""
    if pid := os.environ.pop(SUPERVISOR_PID, ""):  # not that of its children
        die_with_parent(int(pid))
