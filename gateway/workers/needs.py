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
from tandem.protocol.worker import TrainingSpec
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


@dataclass(frozen=True, kw_only=True)
class TrainerNeeds:
    """The needs of a trainer with `ranks` on each of its `nodes`, for up to `runs` runs. It takes
    `snapshots`. If it `sleeps`, its state may move to the host."""

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
    def needs(self) -> Needs:
        on_host = self.host_bytes
        return Needs(
            device_bytes=self.device_bytes if self.gpu else on_host // self.ranks,
            host_bytes=on_host,
        )

    @property
    def host_bytes(self) -> int:
        process = _GPU_RANK if self.gpu else _CPU_RANK
        working = self._host_of_gpu_rank if self.gpu else self._all_of_rank()
        return _rounded(self.ranks * (process + max(self._largest_tensor, working)))

    @property
    def device_bytes(self) -> int:
        """The bytes on each GPU, with the smallest micro-batch that has no checkpointed blocks."""
        tokens = min(self.of_rank.wanted_tokens, PLAIN_TOKENS)
        return _rounded(_ON_DEVICE + self._all_of_rank(tokens))

    @property
    def _largest_tensor(self) -> int:
        return self.model.vocabulary * self.model.hidden * _WEIGHT

    @property
    def _host_of_gpu_rank(self) -> int:
        memory = self.of_rank
        on_host = memory.on_host()
        if not self.snapshots:
            on_host -= {"snapshot"}
        if self.sleeps:
            on_host |= {"frozen weights", "weights", "copies", "gradients", "moments"}
        lasting = memory.lasting(copied=memory.may_copy)
        return sum(size for name, size in lasting.items() if name in on_host)

    def _all_of_rank(self, tokens: int = 0) -> int:
        """Return the bytes of all parts, except those on the host of a GPU. Without `tokens`, the
        micro-batch has the wanted size."""
        memory = self.of_rank
        tokens = tokens or memory.wanted_tokens
        parts = memory.parts(tokens, checkpointed=False, copied=memory.may_copy)
        elsewhere = memory.on_host()
        if not self.snapshots:
            elsewhere.add("snapshot")
        return sum(size for name, size in parts.items() if name not in elsewhere)

    @property
    def of_rank(self) -> TrainerMemory:
        training, device = self.training, "cuda" if self.gpu else "cpu"
        model = self.model.divided(training.layout.tensor_parallel)
        adapters = training.rank * self.model.adapter_width * self.runs
        trained = adapters if training.lora else model.parameters
        size = self.ranks * self.nodes
        # A CPU rank alone computes several micro-batches.
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


@dataclass(frozen=True, kw_only=True)
class EngineNeeds:
    """The needs of an engine. If it `sleeps`, its weights may move to the host. `capacity` is the
    memory of a GPU, where 0 is unknown."""

    model: ModelSize
    sampler: SamplerSettings
    gpu: bool
    sleeps: bool
    capacity: int = 0

    @property
    def needs(self) -> Needs:
        on_host = self.host_bytes
        return Needs(
            device_bytes=self.device_bytes if self.gpu else on_host // self.sampler.ranks,
            host_bytes=on_host,
        )

    @property
    def host_bytes(self) -> int:
        ranks = self.sampler.ranks
        if self.gpu:
            engine = ranks * (_GPU_ENGINE + self._adapters)
            return _rounded(engine + self._weights * (2 if self.sleeps else 1))
        engine = ranks * (_CPU_ENGINE + self._adapters + self.sampler.kv_cache_bytes)
        return _rounded(engine + 2 * self._weights)

    @property
    def device_bytes(self) -> int:
        """The bytes on each GPU."""
        cache = max(_KV_CACHE, self.capacity // _KV_CACHE_PART)
        each = self._weights // self.sampler.ranks + self._adapters
        return _rounded(_ON_DEVICE + each) + cache

    @property
    def _width(self) -> int:
        return _width(self.sampler.dtype, gpu=self.gpu)

    @property
    def _weights(self) -> int:
        return self.model.parameters * self._width

    @property
    def _adapters(self) -> int:
        held = self.sampler.max_adapters * _ADAPTERS_HELD
        return self.sampler.max_lora_rank * self.model.adapter_width * self._width * held


def trainer_needs(
    model: ModelSize,
    *,
    group: WorkerGroup,
    trainer: TrainerSettings,
    training: TrainingSpec,
    snapshots: bool,
    runs: int,
) -> Needs:
    """Return the needs of a trainer on a group."""
    nodes = group.nodes_for(trainer.ranks)
    needs = TrainerNeeds(
        model=model,
        trainer=trainer,
        training=training,
        gpu=not group.on_host,
        ranks=trainer.ranks // nodes,
        nodes=nodes,
        sleeps=group.leased,
        snapshots=snapshots,
        runs=runs,
    )
    return _counted(needs.needs, group)


def engine_needs(model: ModelSize, *, group: WorkerGroup, sampler: SamplerSettings) -> Needs:
    """Return the needs of an engine on a group."""
    needs = EngineNeeds(
        model=model,
        sampler=sampler,
        gpu=not group.on_host,
        sleeps=group.leased,
        capacity=group.device_bytes,
    )
    return _counted(needs.needs, group)


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
