"""The resource requests of a worker's pod: cores, memory, shared memory and files.

The memory is the worker's largest need and so its limit, since a placed pod must be able to sleep.
It derives from the number of weights in the headers of the model's files:

- trainer: one tensor while loading, or, if larger, the trainer's own formula
  (`tandem/backends/memory.py`). On a CPU all its parts count. On a GPU its parts on the host count:
  the snapshot, offloaded parts, and all states while it sleeps.
- sampler: on a GPU the weights while it sleeps, and those of the next version, which is read while
  the engine samples. On a CPU the weights, those of the next version, and a KV cache per rank.

The processes are added, one per rank, and the tenth that a trainer's plan leaves free.
`tandem.host_memory` and `tandem.sampler_host_memory` replace the result.

The process sizes were measured on a CPU only: 367 MiB for a trainer's rank with its libraries,
160 MiB for its custom losses, 637 MiB for an engine without weights and cache. A custom loss's
own tensors are not included."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from gateway.workers.launchers.kubernetes.model_size import known_size, read_size
from tandem.backends.memory import SPARE, ModelSize, TrainerMemory, compute_width
from tandem.errors import InvalidRequest, TandemError
from tandem.protocol.worker import LoraSpec, TrainingSpec, WorkerSpec
from tandem.settings.cluster import ClaimPoolSettings
from tandem.settings.gateway import GatewaySettings
from tandem.settings.sharing import MOST_RUNS
from tandem.settings.workers import SamplerSettings, TrainerSettings

_MIB, _GIB = 2**20, 2**30
_STEP = 64 * _MIB

_CPU_RANK, _GPU_RANK = 768 * _MIB, 4 * _GIB
_CPU_ENGINE, _GPU_ENGINE = 1 * _GIB, 6 * _GIB
_WEIGHT = 4
_ADAPTERS_HELD = 4
"""An engine stores this multiple of its concurrent adapters."""

_CPU_FILES, _GPU_FILES = 2 * _GIB, 10 * _GIB
"""Logs, caches and compiled kernels."""
_SHARED, _SHARED_OF_RANK = 256 * _MIB, 256 * _MIB
"""Messages between a pod's processes, mostly NCCL."""


@dataclass(frozen=True, kw_only=True)
class PodResources:
    """The requests of each pod of a worker: cores, and bytes. `memory` includes `shared_memory`."""

    cpu: str
    memory: int
    shared_memory: int
    ephemeral: int


def resources_of(
    spec: WorkerSpec, model: ModelSize | None, *, pool: ClaimPoolSettings, settings: GatewaySettings
) -> PodResources:
    """Return the requests of each pod. Without a `model`, `spec` must contain the memory."""
    said = spec.host_memory
    if spec.kind == "trainer":
        trainer = spec.trainer or TrainerSettings.of(settings.trainer)
        nodes = math.ceil(trainer.ranks / pool.devices)
        ranks = trainer.ranks // nodes
        memory = (
            said
            or TrainerPod(
                model=_known(model, spec),
                trainer=trainer,
                training=spec.training or TrainingSpec(),
                gpu=pool.has_gpus,
                ranks=ranks,
                nodes=nodes,
                sleeps=pool.awake > 0,
                snapshots=settings.recovery_enabled,
                runs=MOST_RUNS if settings.sharing.lora_runs != "never" else 1,
            ).memory
        )
    else:
        sampler = spec.sampler or SamplerSettings.of(settings.sampler)
        ranks = sampler.ranks
        memory = said or _engine_memory(
            _known(model, spec), sampler, gpu=pool.has_gpus, sleeps=pool.awake > 0
        )
    shared = _SHARED + (_SHARED_OF_RANK * ranks if ranks > 1 else 0)
    return PodResources(
        cpu=_cores(settings.kubernetes.cpus * ranks),
        memory=memory if said else memory + shared,
        shared_memory=min(shared, memory),
        ephemeral=_GPU_FILES if pool.has_gpus else _CPU_FILES,
    )


def most_memory(spec: WorkerSpec, settings: GatewaySettings, *, group: str = "") -> int:
    """Return the largest memory request of a worker's pod on its possible pools, or 0. Requires
    `read_ahead`. Raises `InvalidRequest`."""
    if spec.host_memory:
        return spec.host_memory
    model = known_size(settings.data_dir / spec.model_path)
    trainer, sampler = (
        spec.trainer or TrainerSettings.of(settings.trainer),
        spec.sampler or SamplerSettings.of(settings.sampler),
    )
    ranks = trainer.ranks if spec.kind == "trainer" else sampler.ranks
    requested = (
        resources_of(spec, model, pool=pool, settings=settings).memory
        for pool in settings.claim_pools
        if spec.kind in pool.roles
        and group in ("", pool.name, *(f"{pool.name}-{n}" for n in range(pool.claims)))
        and ranks <= pool.devices * pool.nodes
    )
    return max(requested, default=0)


def _known(model: ModelSize | None, spec: WorkerSpec) -> ModelSize:
    if model is None:
        raise InvalidRequest(f"the size of the model {spec.model_name} is not known")
    return model


def _cores(count: float) -> str:
    """Examples: "4", "500m"."""
    return f"{math.ceil(count * 1000)}m" if count % 1 else str(int(count))


@dataclass(frozen=True, kw_only=True)
class TrainerPod:
    model: ModelSize
    trainer: TrainerSettings
    training: TrainingSpec
    gpu: bool
    ranks: int
    nodes: int
    sleeps: bool
    snapshots: bool
    runs: int

    @property
    def memory(self) -> int:
        process = _GPU_RANK if self.gpu else _CPU_RANK
        working = self._of_gpu_rank if self.gpu else self._of_cpu_rank
        return _rounded(self.ranks * (process + max(self._load, working)))

    @property
    def _load(self) -> int:
        return self.model.vocabulary * self.model.hidden * _WEIGHT

    @property
    def _of_gpu_rank(self) -> int:
        memory = self.of_rank
        on_host = memory.on_host()
        if not self.snapshots:
            on_host -= {"snapshot"}
        if self.sleeps:
            on_host |= {"frozen weights", "weights", "copies", "gradients", "moments"}
        lasting = memory.lasting(copied=memory.may_copy)
        return sum(size for name, size in lasting.items() if name in on_host)

    @property
    def _of_cpu_rank(self) -> int:
        memory = self.of_rank
        copied = memory.may_copy
        parts = memory.parts(memory.wanted_tokens, checkpointed=False, copied=copied)
        if not self.snapshots:
            parts.pop("snapshot", None)
        return sum(parts.values())

    @property
    def of_rank(self) -> TrainerMemory:
        training, device = self.training, "cuda" if self.gpu else "cpu"
        model = self.model.divided(training.layout.tensor_parallel)
        adapters = training.rank * self.model.adapter_width * self.runs
        trained = adapters if training.lora else model.parameters
        size = self.ranks * self.nodes
        # Only a single CPU rank computes several micro-batches at once.
        wide = (_width(self.trainer.dtype, gpu=self.gpu), training.states) == (4, "float32")
        several = size == 1 and wide and not self.gpu and not training.weights_on_host
        return TrainerMemory(
            model=model,
            trained=trained,
            moments=2 * trained,
            training=training,
            settings=self.trainer,
            device=device,
            ranks=size,
            at_once=self.trainer.parallel_micro_batches or 2 if several else 1,
        )


def _engine_memory(model: ModelSize, settings: SamplerSettings, *, gpu: bool, sleeps: bool) -> int:
    width = _width(settings.dtype, gpu=gpu)
    weights = model.parameters * width
    held = settings.max_adapters * _ADAPTERS_HELD
    adapters = settings.max_lora_rank * model.adapter_width * width * held
    if gpu:
        engine = settings.ranks * (_GPU_ENGINE + adapters)
        return _rounded(engine + weights * (2 if sleeps else 1))
    engine = settings.ranks * (_CPU_ENGINE + adapters + settings.kv_cache_bytes)
    return _rounded(engine + 2 * weights)


def _width(dtype: str, *, gpu: bool) -> int:
    """Return the bytes of a parameter during computation."""
    return compute_width(dtype, device="cuda" if gpu else "cpu")


def _rounded(size: float) -> int:
    """Add the spare part and round up."""
    return math.ceil(size / (1 - SPARE) / _STEP) * _STEP


# --- `tandem config --resources` ------------------------------------------------------------------


def table(path: Path, settings: GatewaySettings) -> list[dict[str, object]]:
    """Return the requests of a model's default workers in each pool. Without pools, assume one
    without devices. Raises `InvalidRequest`."""
    model = read_size(path)
    rows: list[dict[str, object]] = []
    default = ClaimPoolSettings(name="cpu", roles=["trainer", "sampler"])
    for pool in settings.claim_pools or [default]:
        for about, spec in _examples(path, settings):
            if spec.kind in pool.roles:
                resources = resources_of(spec, model, pool=pool, settings=settings)
                rows.append({"pool": pool.name, "worker": about, **asdict(resources)})
    return rows


def _examples(path: Path, settings: GatewaySettings) -> Iterator[tuple[str, WorkerSpec]]:
    common = {"secret": "", "model_name": path.name, "model_path": str(path), "session_id": ""}
    lora, ranks = LoraSpec(), settings.trainer.ranks
    trainer = f"trainer with {ranks} rank{'' if ranks == 1 else 's'}"
    for about, training in (
        (f"{trainer}, of all parameters", TrainingSpec()),
        (f"{trainer}, of adapters of rank {lora.rank}", TrainingSpec(lora=lora)),
    ):
        yield about, WorkerSpec(worker_id="", kind="trainer", training=training, **common)
    yield "sampler", WorkerSpec(worker_id="", kind="sampler", **common)


def main() -> int:
    asked = json.loads(sys.stdin.buffer.read())
    try:
        answer: dict[str, object] = {"rows": table(Path(asked["model"]), GatewaySettings())}
    except TandemError as error:
        answer = {"error": error.message}
    sys.stdout.write(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
