"""What a worker's pod requests of its node: cores, memory, shared memory and files.

The memory is what the worker may come to have, and so its limit: a pod that is placed can also
sleep where it is. It is computed from the number of the model's weights, which the headers of its
files tell, by what the trainer and the engine do with them:

    trainer   each rank reads its part of one tensor after the other;
              then there are weights, gradients and two moments in the type of the run's states,
              sharded (or, for adapters, the frozen weights in the type of the computation,
              sharded, and the adapters whole); on a GPU the host has them while the trainer
              sleeps, and moments always that are kept on the host; on a CPU always, with the
              activations; and a copy of weights and moments while a snapshot is written
    sampler   on a GPU the weights while it sleeps, and those of the next version, which is read
              while the engine samples; on a CPU the weights, their packed copies, in whose place
              the next version is read, and the KV cache

to which the processes themselves are added, and a tenth. What a run, its session or its model's
defaults say (`tandem.host_memory`, `tandem.sampler_host_memory`) counts instead.

What a process takes was measured on a CPU (367 MiB for a trainer's rank with its libraries, 637 MiB
for an engine without weights and cache); with a GPU it was not.
"""

from __future__ import annotations

import asyncio
import json
import math
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

from tandem.cluster_settings import ClaimPoolSettings
from tandem.errors import InvalidRequest, TandemError
from tandem.model_config import Json, text_config
from tandem.settings import GatewaySettings, SamplerSettings, TrainerSettings
from tandem.worker import LoraSpec, TrainingSpec, WorkerSpec

_MIB, _GIB = 2**20, 2**30
_STEP = 64 * _MIB

_CPU_RANK, _GPU_RANK = 512 * _MIB, 4 * _GIB
_CPU_ENGINE, _GPU_ENGINE = 1 * _GIB, 6 * _GIB
_SPARE = 1.1

_WEIGHT = 4
"""Bytes of a parameter in float32."""
_OF_LAYER = 68
"""Bytes of float32 activations that a transformer's layer keeps of each token, for each dimension
of its hidden state (Korthikanti et al., arXiv 2205.05198, without the attention's scores)."""
_LOGITS, _OF_LOGITS = 64 * _MIB, 4
"""Of the logits that exist at once, where the settings leave it to the trainer: in the type of the
computation and in float32, their log-softmax, and its gradient."""
_CPU_TOKENS = 2048
"""Of a micro-batch, where the settings leave it to the trainer."""
_ADAPTERS_HELD = 4
"""An engine keeps so many times the adapters that it computes with at once."""

_CPU_FILES, _GPU_FILES = 2 * _GIB, 10 * _GIB
"""For logs, caches and kernels that are compiled."""
_SHARED, _SHARED_OF_RANK = 256 * _MIB, 256 * _MIB
"""For what the processes of one pod tell each other, NCCL above all."""


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """`parameters` of a model, of which an adapter of rank 1 would have `adapter_width`; and the
    size of its parts, 0 where its configuration does not say."""

    parameters: int
    adapter_width: int
    vocabulary: int = 0
    hidden: int = 0
    layers: int = 0


@dataclass(frozen=True, kw_only=True)
class PodResources:
    """Of each pod of a worker: cores, and bytes. `memory` has the `shared_memory`, too."""

    cpu: str
    memory: int
    shared_memory: int
    ephemeral: int


# --- The model ------------------------------------------------------------------------------------


_read: dict[Path, ModelSize | str] = {}
"""What was read of each model last: its size, or why that cannot be read."""


def known_size(path: Path) -> ModelSize:
    """Return the size of a model as `read_ahead` has found it. Raises `InvalidRequest`."""
    known = _read[path]
    if isinstance(known, str):
        raise InvalidRequest(known)
    return known


async def read_ahead(model_path: str, settings: GatewaySettings, *, anew: bool = False) -> None:
    """Read the size of a model whose workers will be pods, if it is not known, or `anew`: in a
    thread, as the volume may hang. What cannot be read is said when it is needed."""
    path = settings.data_dir / model_path
    known = isinstance(_read.get(path), ModelSize)
    if settings.launcher == "kubernetes" and (anew or not known):
        with suppress(InvalidRequest):
            await asyncio.to_thread(read_size, path)


def read_size(path: Path) -> ModelSize:
    """Read the size of a model from the headers of its files. Raises `InvalidRequest`."""
    try:
        size = _read[path] = _size_of(path)
    except InvalidRequest as error:
        _read[path] = error.message
        raise
    return size


def _size_of(path: Path) -> ModelSize:
    shapes: dict[str, list[int]] = {}
    try:
        for file in sorted(path.glob("*.safetensors")):
            shapes |= dict(_shapes(file))
        config = text_config(path)
    except (OSError, ValueError, KeyError) as error:
        raise InvalidRequest(
            f"the size of the model {path.name} cannot be read: {error}"
        ) from error
    if not shapes:
        raise InvalidRequest(f"{path.name} has no safetensors, so that its size is not known")
    matrices = [shape for shape in shapes.values() if len(shape) >= 2]
    return ModelSize(
        parameters=sum(math.prod(shape) for shape in shapes.values()),
        adapter_width=sum(math.prod(s[:-2]) * (s[-2] + s[-1]) for s in matrices),
        vocabulary=_number(config, "vocab_size"),
        hidden=_number(config, "hidden_size"),
        layers=_number(config, "num_hidden_layers"),
    )


def _shapes(file: Path) -> Iterator[tuple[str, list[int]]]:
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(min(length, 100 * _MIB)))
    for name, entry in header.items():
        if name != "__metadata__":
            yield name, entry["shape"]


def _number(config: Json, name: str) -> int:
    value = config.get(name)
    return value if isinstance(value, int) else 0


# --- A pod ----------------------------------------------------------------------------------------


def resources_of(
    spec: WorkerSpec, model: ModelSize | None, *, pool: ClaimPoolSettings, settings: GatewaySettings
) -> PodResources:
    """Return what each pod of a worker requests. Without a `model`, `spec` has to say it."""
    said = spec.host_memory
    if spec.kind == "trainer":
        trainer = spec.trainer or settings.trainer
        nodes = math.ceil(trainer.ranks / pool.devices)
        ranks = trainer.ranks // nodes
        memory = (
            said
            or _Trainer(
                model=_known(model, spec),
                trainer=trainer,
                training=spec.training or TrainingSpec(),
                gpu=pool.has_gpus,
                ranks=ranks,
                nodes=nodes,
                sleeps=pool.awake > 0,
                snapshots=settings.recovery.enabled,
                runs=settings.sharing.most_runs if settings.sharing.lora_runs != "never" else 1,
            ).memory
        )
    else:
        ranks = 1
        sampler = spec.sampler or settings.sampler
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
    """Return what a pod of a worker requests at most on the pools, or the pool, that it may be on;
    0 if there is none. The size of its model was read (`read_ahead`). Raises `InvalidRequest`."""
    if spec.host_memory:
        return spec.host_memory
    model = known_size(settings.data_dir / spec.model_path)
    ranks = (spec.trainer or settings.trainer).ranks if spec.kind == "trainer" else 1
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
    """Literal examples: "4", "500m"."""
    return f"{math.ceil(count * 1000)}m" if count % 1 else str(int(count))


@dataclass(frozen=True, kw_only=True)
class _Trainer:
    """The memory of one pod of a trainer, with so many of its `ranks`."""

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
        processes = self.ranks * (_GPU_RANK if self.gpu else _CPU_RANK)
        state = self._state if self.sleeps or not self.gpu else self._moments_on_host
        snapshot = self._snapshot if self.snapshots else 0
        working = state + snapshot + (0 if self.gpu else self._activations)
        return _rounded(processes + max(self._load, working))

    @property
    def _load(self) -> int:
        """Of the largest tensor, once for each rank."""
        return self.ranks * self.model.vocabulary * self.model.hidden * _WEIGHT

    @cached_property
    def _gradients(self) -> int:
        """How many there are of each parameter: a CPU rank alone computes several micro-batches."""
        if self.gpu or self.ranks * self.nodes > 1 or self.training.states != "float32":
            return 1
        return self.trainer.parallel_micro_batches or 2

    @property
    def _state(self) -> int:
        each = self.training.state_bytes
        trained = each.weight + each.gradient * self._gradients + each.moments
        if self.training.lora is None:
            return self.model.parameters * trained // self.nodes
        whole = self.ranks * self.nodes == 1
        frozen = self.model.parameters * _width(self.trainer.dtype, gpu=self.gpu)
        adapters = self._adapter * trained
        return frozen // (1 if whole else self.nodes) + adapters * self.runs * self.ranks

    @property
    def _moments_on_host(self) -> int:
        """Of a trainer that is awake on a GPU."""
        if self.training.moments == "device":
            return 0
        return self.model.parameters * self.training.state_bytes.moments // self.nodes

    @property
    def _snapshot(self) -> int:
        each = self.training.state_bytes
        if self.training.lora is None:
            return self.model.parameters * (each.weight + each.moments) // self.nodes
        return self._adapter * (each.weight + each.moments) * self.runs * self.ranks

    @property
    def _adapter(self) -> int:
        return self.training.rank * self.model.adapter_width

    @property
    def _activations(self) -> int:
        at_once = self.ranks * self._gradients
        tokens = self.trainer.micro_batch_tokens or _CPU_TOKENS
        of_token = self.model.layers * self.model.hidden * _OF_LAYER
        logits = min(self.trainer.logits_bytes or _LOGITS, tokens * self.model.vocabulary * _WEIGHT)
        return at_once * (tokens * of_token + logits * _OF_LOGITS)


def _engine_memory(model: ModelSize, settings: SamplerSettings, *, gpu: bool, sleeps: bool) -> int:
    width = _width(settings.dtype, gpu=gpu)
    weights = model.parameters * width
    held = settings.max_adapters * _ADAPTERS_HELD
    adapters = settings.max_lora_rank * model.adapter_width * width * held
    if gpu:
        return _rounded(_GPU_ENGINE + adapters + weights * (2 if sleeps else 1))
    return _rounded(_CPU_ENGINE + adapters + 2 * weights + settings.kv_cache_bytes)


def _width(dtype: str, *, gpu: bool) -> int:
    """Return the bytes of a parameter in the type of the computation."""
    return 2 if dtype == "bfloat16" or (dtype == "auto" and gpu) else 4


def _rounded(size: float) -> int:
    return math.ceil(size * _SPARE / _STEP) * _STEP


# --- What `tandem config --resources` shows -------------------------------------------------------


def table(path: Path, settings: GatewaySettings) -> list[dict[str, object]]:
    """Return what pods of a model request in each pool, for workers that ask for nothing; without
    pools, in one that has no devices. Raises `InvalidRequest`."""
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
    """Answer the command line, which gives the path of a model."""
    asked = json.loads(sys.stdin.buffer.read())
    try:
        answer: dict[str, object] = {"rows": table(Path(asked["model"]), GatewaySettings())}
    except TandemError as error:
        answer = {"error": error.message}
    sys.stdout.write(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
