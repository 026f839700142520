"""The resource requests of a worker's pod: cores, memory, shared memory and files.

The memory is the worker's largest need (`gateway.workers.needs`) and so its limit, since a placed
pod must be able to sleep. `tandem.host_memory` and `tandem.sampler_host_memory` replace it."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from gateway.workers.model_sizes import known_size, read_size
from gateway.workers.needs import EngineNeeds, TrainerNeeds
from tandem.backends.memory import ModelSize
from tandem.errors import InvalidRequest, TandemError
from tandem.protocol.worker import LoraSpec, TrainingSpec, WorkerSpec
from tandem.settings.cluster import ClaimPoolSettings
from tandem.settings.gateway import GatewaySettings
from tandem.settings.sharing import MOST_RUNS
from tandem.settings.workers import SamplerSettings, TrainerSettings

_MIB, _GIB = 2**20, 2**30

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
            or TrainerNeeds(
                model=_known(model, spec),
                trainer=trainer,
                training=spec.training or TrainingSpec(),
                gpu=pool.has_gpus,
                ranks=ranks,
                nodes=nodes,
                sleeps=pool.awake > 0,
                snapshots=settings.recovery_enabled,
                runs=MOST_RUNS if settings.sharing.lora_runs != "never" else 1,
            ).host_bytes
        )
    else:
        sampler = spec.sampler or SamplerSettings.of(settings.sampler)
        ranks = sampler.ranks
        memory = (
            said
            or EngineNeeds(
                model=_known(model, spec),
                sampler=sampler,
                gpu=pool.has_gpus,
                sleeps=pool.awake > 0,
            ).host_bytes
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
