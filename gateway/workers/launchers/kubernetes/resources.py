"""The resource requests of a worker's pod: cores, memory, shared memory and files.

The memory is the worker's largest need (`gateway.workers.needs`) and so its limit, since a placed
pod must be able to sleep. `tandem.host_memory` and `tandem.sampler_host_memory` replace it."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from gateway.workers.declared_groups import group_of_claim
from gateway.workers.model_sizes import read_size
from gateway.workers.needs import Needs
from gateway.workers.request_maker import RequestMaker
from gateway.workers.requests import WorkerRequest
from gateway.workers.run_options import default_options
from tandem.errors import TandemError
from tandem.protocol.worker import LoraSpec, TrainingSpec, WorkerSpec
from tandem.settings.cluster import ClaimPoolSettings
from tandem.settings.gateway import GatewaySettings
from tandem.settings.workers import SamplerSettings

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


def pod_request(
    request: WorkerRequest, needs: Callable[[], Needs], pools: Sequence[ClaimPoolSettings]
) -> WorkerRequest:
    """Return the request with the memory of its pods, which the scheduler must know. Raises
    `InvalidRequest` for a model of unknown size."""
    if request.host_bytes:
        return request
    ranks = min(request.ranks, max(pool.devices for pool in pools))
    return replace(request, host_bytes=needs().host_bytes + _shared_memory(ranks))


def resources_of(
    spec: WorkerSpec, *, pool: ClaimPoolSettings, settings: GatewaySettings
) -> PodResources:
    """Return the requests of each pod of a worker."""
    if spec.trainer is not None:
        ranks = spec.trainer.ranks // math.ceil(spec.trainer.ranks / pool.devices)
    else:
        ranks = spec.sampler.ranks if spec.sampler is not None else 1
    return PodResources(
        cpu=_cores(settings.kubernetes.cpus * ranks),
        memory=spec.host_memory,
        shared_memory=min(_shared_memory(ranks), spec.host_memory),
        ephemeral=_GPU_FILES if pool.has_gpus else _CPU_FILES,
    )


def _shared_memory(ranks: int) -> int:
    return _SHARED + (_SHARED_OF_RANK * ranks if ranks > 1 else 0)


def _cores(count: float) -> str:
    """Examples: "4", "500m"."""
    return f"{math.ceil(count * 1000)}m" if count % 1 else str(int(count))


# --- `tandem config --resources` ------------------------------------------------------------------


def table(path: Path, settings: GatewaySettings) -> list[dict[str, object]]:
    """Return the requests of a model's default workers in each pool. Without pools, assume one
    without devices. Raises `InvalidRequest`."""
    read_size(path)
    rows: list[dict[str, object]] = []
    default = ClaimPoolSettings(name="cpu", roles=["trainer", "sampler"])
    for pool in settings.claim_pools or [default]:
        for about, spec in _examples(path, settings, pool):
            if spec.kind in pool.roles:
                resources = resources_of(spec, pool=pool, settings=settings)
                rows.append({"pool": pool.name, "worker": about, **asdict(resources)})
    return rows


def _examples(
    path: Path, settings: GatewaySettings, pool: ClaimPoolSettings
) -> Iterator[tuple[str, WorkerSpec]]:
    options, group = default_options(settings), group_of_claim(pool, 0)
    maker = RequestMaker(
        settings=settings, groups=lambda: (group,), prepare=partial(pod_request, pools=[pool])
    )
    about: dict[str, str] = {"key": "", "owner": "", "session": "", "model": str(path)}
    spec = WorkerSpec(
        worker_id="",
        kind="trainer",
        secret="",
        model_name=path.name,
        model_path=str(path),
        session_id="",
        trainer=options.trainer_settings(settings),
    )
    lora = LoraSpec()
    ranks = f"{options.ranks} rank{'' if options.ranks == 1 else 's'}"
    for trained, training in (
        ("all parameters", TrainingSpec()),
        (f"adapters of rank {lora.rank}", TrainingSpec(lora=lora)),
    ):
        request = maker.trainer(**about, options=options, training=training, engines=())
        memory = {"host_memory": request.host_bytes}
        yield f"trainer with {ranks}, of {trained}", spec.model_copy(update=memory)
    request = maker.engine(**about, sampler="", options=options, max_lora_rank=0)
    sampler: dict[str, object] = {
        "kind": "sampler",
        "trainer": None,
        "sampler": SamplerSettings.of(settings.sampler),
        "host_memory": request.host_bytes,
    }
    yield "sampler", spec.model_copy(update=sampler)


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
