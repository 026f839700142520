"""The resource requests of a worker's pod: cores, memory, shared memory and files.

The memory is the worker's largest need (`gateway.workers.needs`) and so its limit, since a placed
pod must be able to sleep. `tandem.host_memory` and `tandem.sampler_host_memory` replace it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from gateway.workers.needs import Needs
from gateway.workers.requests import WorkerRequest
from tandem.protocol.worker import WorkerSpec
from tandem.settings.cluster import ClaimPoolSettings
from tandem.settings.gateway import GatewaySettings

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


PREFLIGHT = PodResources(
    cpu="100m", memory=512 * _MIB, shared_memory=64 * _MIB, ephemeral=256 * _MIB
)
"""Two interpreters that import no framework."""


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
    if spec.job is not None:
        ranks = spec.job.processes
    elif spec.trainer is not None:
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
