"""Plans the memory of an FSDP2 backend by the formula of `tandem/backends/memory.py`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from tandem.agent.host import free_memory_bytes
from tandem.backends.memory import SPARE, Available, MemoryPlan, ModelSize, TrainerMemory, choose
from tandem.protocol.worker import TrainingSpec
from tandem.settings.workers import TrainerSettings
from tandem.telemetry import get_log
from trainer_service.backends.base import TrainerBackend, World
from trainer_service.lora.adapters import chosen_layers
from trainer_service.models.huggingface import empty_model
from trainer_service.models.tensor_parallel import shapes_on_a_rank
from trainer_service.optimizers import outer_parameters

_Shapes = Mapping[str, Sequence[int]]


def at_once(backend: TrainerBackend, settings: TrainerSettings, *, threads: int) -> int:
    if not backend.threads:
        return 1
    return min(settings.parallel_micro_batches or 2, threads)


def plan_memory(memory: TrainerMemory, *, world: World) -> MemoryPlan:
    """Choose the plan of a rank, and log it. Raises `WorkerStartFailed`."""
    plan = choose(memory, _available(memory.settings, world))
    if world.rank == 0:
        get_log().info(
            "memory_plan",
            micro_batch_tokens=plan.micro_batch_tokens,
            checkpointing=plan.checkpointing,
            needs=plan.device,
            available=plan.available.device,
            host_needs=plan.host,
            host_available=plan.available.host,
        )
    return plan


def memory_of(
    path: Path,
    *,
    training: TrainingSpec,
    settings: TrainerSettings,
    world: World,
    at_once: int = 1,
) -> TrainerMemory:
    """The memory of a rank that trains the model at `path`. Raises `UnsuitableLora`."""
    model = empty_model(path)
    outer = {name.rpartition(".")[0] for name in outer_parameters(model)}
    adapters: dict[str, tuple[int, ...]] = {}
    if training.lora is not None:
        rank = training.lora.rank
        for name, layer in chosen_layers(model, training.lora).items():
            adapters[f"{name}.lora_A"] = (rank, layer.in_features)
            adapters[f"{name}.lora_B"] = (layer.out_features, rank)
    shapes = shapes_on_a_rank(model, training.layout.tensor_parallel)
    trained = adapters or shapes
    return TrainerMemory(
        model=ModelSize.of_shapes(shapes, model.config.get_text_config().to_dict()),
        trained=sum(math.prod(shape) for shape in trained.values()),
        moments=_moments(trained, training, outer=outer),
        training=training,
        settings=settings,
        device=world.device,
        ranks=world.size,
        at_once=at_once,
    )


def _moments(trained: _Shapes, training: TrainingSpec, *, outer: set[str]) -> int:
    """Count moments: two for each trained number, or one in a matrix of dimuon.

    Dimuon trains embeddings and head, the `outer` layers, with AdamW."""

    def each(name: str, shape: Sequence[int]) -> int:
        hidden = len(shape) == 2 and name.rpartition(".")[0] not in outer
        return 1 if training.optimizer == "dimuon" and hidden else 2

    return sum(each(name, shape) * math.prod(shape) for name, shape in trained.items())


def _available(settings: TrainerSettings, world: World) -> Available:
    """The least memory available to any rank, so that all ranks plan alike."""
    host = int((1 - SPARE) * free_memory_bytes())
    device = host
    if world.device == "cuda":
        device = int((1 - SPARE) * torch.cuda.mem_get_info()[0])
    device = min(device, settings.memory_bytes or device)
    sharing = world.on_node or world.size
    found = [device // sharing, 0] if world.device == "cpu" else [device, host // sharing]
    if world.size > 1:
        least = torch.tensor(found, device=world.device)
        dist.all_reduce(least, op=dist.ReduceOp.MIN)
        found = least.tolist()
    return Available(device=found[0], host=found[1])
