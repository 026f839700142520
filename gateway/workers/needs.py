"""Needs: the most bytes of a worker on its devices and on its host.

They follow from the headers of the model's files, without torch:

    trainer   The formula of `tandem/backends/memory.py` gives the parts. A CPU rank has all parts
              on the host. A GPU rank has the snapshot and offloaded parts there, and all states
              while it sleeps. Before that, a rank reads one tensor at a time.
    engine    A GPU has the weights and a KV cache. The host has the weights of the next version,
              and the engine's own weights while it sleeps. A CPU engine has all of this on the
              host.

Each rank adds a process. A tenth more is left free. The adapters of all runs that may share the
trainer count. Tensors of custom losses do not.

CPU processes were measured: 367 MiB for a trainer's rank with its libraries, 160 MiB for its
process of custom losses, 637 MiB for an engine without weights and cache. GPU processes are
estimates."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

from gateway.workers.groups import WorkerGroup
from gateway.workers.requests import WorkerRequest
from tandem.backends.memory import PLAIN_TOKENS, SPARE, ModelSize, TrainerMemory, compute_width
from tandem.errors import InvalidRequest
from tandem.protocol.worker import Layout, TrainingSpec
from tandem.settings.workers import SamplerSettings, TrainerSettings

_MIB, _GIB = 2**20, 2**30
_STEP = 64 * _MIB

_CPU_RANK, _GPU_RANK = 768 * _MIB, 4 * _GIB
_CPU_ENGINE, _GPU_ENGINE = 1 * _GIB, 6 * _GIB
_ON_DEVICE = 1 * _GIB
"""Device memory of a process besides its state and its context."""
_KV_CACHE = 4 * _GIB
"""The smallest KV cache of an engine on a GPU."""
_KV_CACHE_PART = 8
"""An engine on a GPU gets an eighth of the device for its KV cache, if that is more."""
_LEFT_PART = 4
"""Sleepers leave at most a quarter of a device to themselves."""
_WEIGHT = 4
"""Bytes of a parameter in float32."""
_ADAPTERS_HELD = 4
"""An engine keeps four times as many adapters as it computes with at once."""


@dataclass(frozen=True, kw_only=True)
class Needs:
    """The bytes of a worker: on each of its devices, and on the host of one of its nodes."""

    device_bytes: int = 0
    host_bytes: int = 0

    def or_more(self, other: Needs) -> Needs:
        """Return needs that cover both."""
        return Needs(
            device_bytes=max(self.device_bytes, other.device_bytes),
            host_bytes=max(self.host_bytes, other.host_bytes),
        )


def trainer_needs(
    model: ModelSize,
    *,
    group: WorkerGroup,
    trainer: TrainerSettings,
    training: TrainingSpec,
    snapshots: bool,
    runs: int,
) -> Needs:
    """Return the needs of a trainer on a group, for up to `runs` runs, with or without
    `snapshots`."""
    gpu = not group.on_host
    ranks = trainer.ranks // group.nodes_for(trainer.ranks)  # of one node
    memory = memory_of_rank(model, trainer, training, gpu=gpu, runs=runs)
    elsewhere = memory.on_host() if snapshots else memory.on_host() | {"snapshot"}
    largest_tensor = model.vocabulary * model.hidden * _WEIGHT

    def rank_bytes(tokens: int) -> int:
        parts = memory.parts(tokens, checkpointed=False, copied=memory.may_copy)
        return sum(size for name, size in parts.items() if name not in elsewhere)

    if not gpu:
        working = max(largest_tensor, rank_bytes(memory.wanted_tokens))
        on_host = _rounded(ranks * (_CPU_RANK + working))
        return _counted(Needs(device_bytes=on_host // ranks, host_bytes=on_host), group)
    offloaded = memory.on_host() if snapshots else memory.on_host() - {"snapshot"}
    if group.leased:  # while it sleeps
        offloaded |= {"frozen weights", "weights", "copies", "gradients", "moments"}
    lasting = memory.lasting(copied=memory.may_copy)
    working = sum(size for name, size in lasting.items() if name in offloaded)
    # The smallest micro-batch that has no checkpointed blocks.
    on_device = rank_bytes(min(memory.wanted_tokens, PLAIN_TOKENS))
    needs = Needs(
        device_bytes=_rounded(_ON_DEVICE + on_device),
        host_bytes=_rounded(ranks * (_GPU_RANK + max(largest_tensor, working))),
    )
    return _counted(needs, group)


def memory_of_rank(
    model: ModelSize, trainer: TrainerSettings, training: TrainingSpec, *, gpu: bool, runs: int
) -> TrainerMemory:
    part = model.divided(training.layout.tensor_parallel)
    adapters = training.rank * model.adapter_width * runs
    trained = adapters if training.lora else part.parameters
    # A CPU rank alone computes several micro-batches.
    wide = (_width(trainer.dtype, gpu=gpu), training.states) == (4, "float32")
    several = trainer.ranks == 1 and wide and not gpu and not training.weights_on_host
    return TrainerMemory(
        model=part,
        trained=trained,
        moments=2 * trained,
        training=training,
        settings=trainer,
        device="cuda" if gpu else "cpu",
        ranks=trainer.ranks,
        at_once=trainer.parallel_micro_batches or 2 if several else 1,
    )


def engine_needs(model: ModelSize, *, group: WorkerGroup, sampler: SamplerSettings) -> Needs:
    """Return the needs of an engine on a group."""
    gpu, ranks = not group.on_host, sampler.ranks
    width = _width(sampler.dtype, gpu=gpu)
    weights = model.parameters * width
    held = sampler.max_adapters * _ADAPTERS_HELD
    adapters = sampler.max_lora_rank * model.adapter_width * width * held
    if not gpu:
        engines = ranks * (_CPU_ENGINE + adapters + sampler.kv_cache_bytes)
        on_host = _rounded(engines + 2 * weights)
        return _counted(Needs(device_bytes=on_host // ranks, host_bytes=on_host), group)
    cache = max(_KV_CACHE, group.device_bytes // _KV_CACHE_PART)
    copies = 2 if group.leased else 1  # its own weights move to the host while it sleeps
    needs = Needs(
        device_bytes=_rounded(_ON_DEVICE + weights // ranks + adapters) + cache,
        host_bytes=_rounded(ranks * (_GPU_ENGINE + adapters) + copies * weights),
    )
    return _counted(needs, group)


def job_needs(model: ModelSize, *, group: WorkerGroup, ranks: int, training: TrainingSpec) -> Needs:
    """Return the host memory of a job in a pod, and none elsewhere: a job takes its devices whole.

    Each rank reads the whole model. On cores it also has the state of its training, and the weights
    of a reference model."""
    if not group.pool:
        return Needs()
    weights = model.parameters * _WEIGHT
    if not group.on_host:
        return Needs(host_bytes=_rounded(ranks * (_GPU_RANK + weights)))
    trainer = trainer_needs(
        model,
        group=group,
        trainer=TrainerSettings(ranks=ranks, dtype="float32"),
        training=training.model_copy(update={"layout": Layout(replicas=ranks)}),
        snapshots=False,
        runs=1,
    )
    return Needs(host_bytes=trainer.host_bytes + _rounded(ranks * weights))


Prepare: TypeAlias = Callable[[WorkerRequest, Callable[[], Needs]], WorkerRequest]
"""Gives a request the bytes of its worker. The function returns the needs on the largest group. It
raises `InvalidRequest` for a model of unknown size."""


def with_needs(request: WorkerRequest, needs: Callable[[], Needs]) -> WorkerRequest:
    """Implements `Prepare` for processes. A model of unknown size has unknown needs."""
    try:
        found = needs()
    except InvalidRequest:
        return request
    return replace(
        request,
        device_bytes=request.device_bytes or found.device_bytes,
        host_bytes=request.host_bytes or found.host_bytes,
    )


def engine_share(group: WorkerGroup, request: WorkerRequest) -> int:
    """Return the bytes of each device that an engine may use, or 0 for its own choice.

    Beside awake trainers it gets its need. Otherwise it gets an equal part of the device, after
    room for the contexts of sleepers, at most a quarter, is subtracted."""
    if group.on_host or not group.device_bytes:
        return 0
    if not group.leased or (group.awake > 1 and "trainer" in group.kinds):
        return request.device_bytes
    left = min(group.workers * group.context_bytes, group.device_bytes // _LEFT_PART)
    return (group.device_bytes - left) // group.awake


def _counted(needs: Needs, group: WorkerGroup) -> Needs:
    """Drop the host bytes where workers take turns. A sleeper's state can go to disk there, so host
    memory bounds its sleep and not its place. A pod requests all its memory."""
    return needs if group.pool or not group.leased else Needs(device_bytes=needs.device_bytes)


def _width(dtype: str, *, gpu: bool) -> int:
    """Return the bytes of a parameter in the type of the computation."""
    return compute_width(dtype, device="cuda" if gpu else "cpu")


def _rounded(size: float) -> int:
    """Add the tenth that is left free."""
    return math.ceil(size / (1 - SPARE) / _STEP) * _STEP
