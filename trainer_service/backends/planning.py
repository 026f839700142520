"""Plans the memory of a backend that shards with FSDP2 (`models/memory_plan.py`): what lasts is
arithmetic, what a micro-batch takes is counted on a stand-in without memory.

A stand-in is the backend itself with the whole model on torch's `meta` device. FSDP2 does not run
there. Its gradients and the buffers in which they are reduced are made here, group by group, as it
makes them. The size of the parameters that it gathers is arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from tandem import trainer_memory
from tandem.errors import TandemError, describe
from tandem.host import free_memory_bytes
from tandem.telemetry import get_log
from tandem.trainer_memory import (
    SPARE,
    Elements,
    gathered,
    lasting_bytes,
    parts_on_host,
    streamed_bytes,
)
from tandem.worker import TrainingSpec
from tandem.worker_settings import TrainerSettings
from trainer_service.backends.base import Capability, TrainerBackend, World
from trainer_service.batches.micro_batches import MicroBatch
from trainer_service.losses.base import LossResult
from trainer_service.models.heap import most_living, most_taken
from trainer_service.models.huggingface import UNFIT
from trainer_service.models.memory_plan import (
    Available,
    MemoryPlan,
    Needs,
    choose,
    wanted_tokens,
)
from trainer_service.models.packing import bounds_of
from trainer_service.models.products import kept_bytes
from trainer_service.models.rehearsal import trace_of
from trainer_service.optimizers.staged import staging_bytes

Group = Sequence[nn.Parameter]


@dataclass(frozen=True)
class StandIn:
    """`backend` computes on `meta`. `groups` are the parameters that FSDP gathers at once, the root
    last; there are none where nothing is sharded. `dtype` is that of the computation. `outer` names
    the trainable parameters that dimuon leaves to AdamW. `copied`: the model's own parameters are
    copies of those that are trained. oneDNN multiplies with the matrices `by_onednn`."""

    backend: TrainerBackend
    model: nn.Module
    trainable: Mapping[str, nn.Parameter]
    groups: Sequence[Group]
    dtype: torch.dtype
    outer: frozenset[str]
    copied: bool = False
    by_onednn: Sequence[nn.Parameter] = ()


class MakeStandIn(Protocol):
    def __call__(self, *, checkpointed: bool, packs: bool) -> StandIn: ...


def at_once(backend: TrainerBackend, settings: TrainerSettings, *, threads: int) -> int:
    """How many micro-batches a rank computes at the same time."""
    if Capability.THREADS not in backend.capabilities:
        return 1
    return min(settings.parallel_micro_batches or 2, threads)


def plan_memory(
    stand_in: MakeStandIn,
    *,
    settings: TrainerSettings,
    world: World,
    training: TrainingSpec,
    at_once: int,
) -> MemoryPlan | None:
    """So many micro-batches are computed `at_once`. None, and a line in the log, for a model that
    does not compute without memory. Raises `WorkerStartFailed`."""
    of, packs = cache(stand_in), settings.packing == "on"

    try:
        about = of(checkpointed=settings.checkpointing == "on", packs=packs)
        unreduced = unreduced_gradients(
            about.model, settings=settings, world=world, training=training
        )
        of_micro_batch = partial(
            _of_micro_batch,
            threads=at_once > 1,
            on_cpu=world.device == "cpu",
            ranks=world.size,
            unreduced=unreduced > 0,
            leaves_in=training.layout.shards(world.size) if _offloads(training, world) else 0,
        )

        trained = sum(each.numel() for each in about.trainable.values())
        shards = training.layout.shards(world.size) if about.groups else 1
        of_step = staging_bytes(-(-trained // shards), training, device=world.device)

        def activations(tokens: int, checkpointed: bool) -> int:
            try:
                model = of(checkpointed=checkpointed, packs=packs)
                size = of_micro_batch(model, tokens)
            except NotImplementedError:  # what packed attention says of some models
                model = of(checkpointed=checkpointed, packs=False)
                size = of_micro_batch(model, tokens)
            # A step comes after them.
            return max(at_once * size, of_step) + kept_bytes(model.by_onednn, tokens)

        plan = choose(
            wanted=wanted_tokens(settings.micro_batch_tokens, device=world.device),
            checkpointing=settings.checkpointing,
            lasting=lasting(
                about, training=training, world=world, at_once=at_once, unreduced=unreduced
            ),
            activations=activations,
            available=_available(settings, world),
            what_helps=_what_helps(about, training, world),
        )
    except TandemError:
        raise
    except UNFIT as error:  # a model's code may need values
        get_log().warning("memory_not_planned", error=describe(error, typed=True)[:300])
        return None
    if world.rank == 0:
        get_log().info(
            "memory_plan",
            micro_batch_tokens=plan.micro_batch_tokens,
            checkpointing=plan.checkpointing,
            needs=plan.needs.device,
            available=plan.available.device,
            host_needs=plan.needs.host,
            host_available=plan.available.host,
        )
    return plan


# --- What lasts -----------------------------------------------------------------------------------


def unreduced_gradients(
    model: nn.Module, *, settings: TrainerSettings, world: World, training: TrainingSpec
) -> int:
    """As `trainer_memory.unreduced_gradients`."""
    return trainer_memory.unreduced_gradients(
        sum(each.numel() for each in model.parameters()),
        limit=settings.unreduced_gradients_bytes,
        device=world.device,
        ranks=world.size,
        training=training,
    )


def lasting(
    stand_in: StandIn, *, training: TrainingSpec, world: World, at_once: int, unreduced: int = 0
) -> Needs:
    """What a rank needs between and during all operations."""
    groups = [sum(each.numel() for each in group) for group in stand_in.groups]
    parameters = sum(each.numel() for each in stand_in.model.parameters())
    elements = Elements(
        parameters=parameters,
        trained=sum(each.numel() for each in stand_in.trainable.values()),
        moments=_moments(stand_in, training),
        gathered=gathered(groups[:-1], root=groups[-1]) if groups else 0,
        copied=parameters if stand_in.copied else 0,
    )
    shards = training.layout.shards(world.size) if groups else 1
    streamed = 0
    if _offloads(training, world):
        streamed = streamed_bytes(
            groups[:-1],
            root=groups[-1],
            shards=shards,
            width=stand_in.dtype.itemsize,
            training=training,
        )
    parts = lasting_bytes(
        elements,
        training=training,
        shards=shards,
        width=stand_in.dtype.itemsize,
        threads=at_once,
        unreduced=unreduced,
        streamed=streamed,
    )
    if world.device == "cpu":
        return Needs(parts)
    on_host = parts_on_host(training)
    if "gradients" in on_host:
        parts["gradients"] = _pinned_gradients(stand_in, training, shards=shards)
    return Needs(
        {name: size for name, size in parts.items() if name not in on_host},
        {name: parts[name] for name in parts if name in on_host},
    )


def _offloads(training: TrainingSpec, world: World) -> bool:
    """Whether weights come to another device from the host, and gradients leave for it."""
    return training.weights_on_host and world.device != "cpu"


def _pinned_gradients(stand_in: StandIn, training: TrainingSpec, *, shards: int) -> int:
    """The bytes of gradients on the host. FSDP has torch pin the memory of each, which rounds it up
    to a power of two."""
    width = training.state_bytes.gradient
    sizes = (width * math.ceil(each.numel() / shards) for each in stand_in.trainable.values())
    return sum(1 << (size - 1).bit_length() for size in sizes)


def _moments(stand_in: StandIn, training: TrainingSpec) -> int:
    """How many elements the moments have: two for each parameter, or one for a matrix of dimuon."""
    return sum(
        each.numel()
        * (1 if training.optimizer == "dimuon" and _is_hidden(name, each, stand_in) else 2)
        for name, each in stand_in.trainable.items()
    )


def _is_hidden(name: str, parameter: nn.Parameter, stand_in: StandIn) -> bool:
    return parameter.ndim == 2 and name not in stand_in.outer


# --- What comes and goes --------------------------------------------------------------------------


def _of_micro_batch(
    stand_in: StandIn,
    tokens: int,
    *,
    threads: bool = False,
    on_cpu: bool = True,
    ranks: int = 1,
    unreduced: bool = False,
    leaves_in: int = 0,
) -> int:
    """The most bytes that one micro-batch has on the device at once. `unreduced`: beside the
    gradients of the whole model, which it adds to. Gradients leave for the host in so many shards
    (0: they stay)."""
    backend, trainable = stand_in.backend, list(stand_in.trainable.values())
    micro_batch = _micro_batch(backend, tokens)
    reduced = {id(each) for group in stand_in.groups for each in group if not unreduced}
    for parameter in trainable:
        parameter.grad = None if id(parameter) in reduced else torch.empty_like(parameter)

    def compute() -> None:
        _, result = backend.loss_of(
            micro_batch, lambda logprobs: LossResult(loss=-logprobs.sum()), by_entry=True
        )
        if threads:
            backend.gradients(result.loss)
        else:
            backend.backward(result.loss)
        buffers.clear()

    held = [each.grad for each in trainable if each.grad is not None]
    buffers: list[torch.Tensor] = []
    hooks = _reduce(stand_in.groups, buffers, in_copies=on_cpu and ranks > 1, leaves_in=leaves_in)
    try:
        trace = trace_of(
            compute,
            besides=[*stand_in.model.parameters(), *stand_in.model.buffers(), *trainable, *held],
        )
    finally:
        for hook in hooks:
            hook.remove()
    return most_taken(trace) if on_cpu else most_living(trace)


def _micro_batch(backend: TrainerBackend, tokens: int) -> MicroBatch:
    """So many tokens in sequences as long as the model allows: some models keep what grows with the
    square of a sequence."""
    length = min(tokens, backend.facts.max_length or tokens)
    rows = tokens // length
    shape = (1, rows * length) if backend.packs else (rows, length)
    return MicroBatch(
        tokens=np.zeros(shape, np.int64),
        targets=np.zeros((*shape, 1), np.int64),
        select=None,
        entries=np.arange(rows * length),
        inputs={},
        positions=np.tile(np.arange(length), rows)[None] if backend.packs else None,
        bounds=bounds_of([length] * rows) if backend.packs else None,
    )


def _reduce(
    groups: Sequence[Group], buffers: list[torch.Tensor], *, in_copies: bool, leaves_in: int
) -> list[torch.utils.hooks.RemovableHandle]:
    """Do to gradients what FSDP2 does: those of a group live until all are there, are copied into
    one buffer in float32 that is reduced, and this lives until the next one, or the backward pass
    ends. gloo reduces in a copy of that (`in_copies`). What is reduced and leaves for the host
    (`_of_micro_batch`) is there in float32, and once more in its own type."""
    hooks = []
    for group in groups:
        members = [each for each in group if each.requires_grad]
        waiting = {id(each) for each in members}

        def note(
            parameter: nn.Parameter, members: Group = members, waiting: set[int] = waiting
        ) -> None:
            waiting.discard(id(parameter))
            if not waiting:
                size = sum(each.numel() for each in members)
                buffers[:] = [torch.empty(size, dtype=torch.float32, device="meta")]
                if in_copies:
                    buffers[0].clone()
                if leaves_in:
                    reduced = torch.empty(math.ceil(size / leaves_in), device="meta")
                    buffers.extend((reduced, reduced.to(members[0].dtype)))  # float32: one
                for each in members:
                    each.grad = None
                waiting.update(id(each) for each in members)

        hooks += [each.register_post_accumulate_grad_hook(note) for each in members]
    return hooks


# --- What there is --------------------------------------------------------------------------------


def _available(settings: TrainerSettings, world: World) -> Available:
    """The least of what any rank may use, so that all plan alike."""
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


def _what_helps(stand_in: StandIn, training: TrainingSpec, world: World) -> list[str]:
    helps = ["more ranks" if world.device == "cuda" else "more memory, or ranks on more hosts"]
    if training.layout.replicas > 1:
        helps.append(f"one copy of the model on all ranks (tandem.shards={world.size})")
    if training.lora is None:
        helps.append("LoRA")
    if training.lora is None and training.optimizer == "adamw":
        if training.states == "float32":
            helps.append("states in bfloat16 (tandem.states)")
        if training.offload == "none" and world.device == "cuda":
            helps.append("moments on the host (tandem.offload=moments)")
    offloads = training.optimizer == "adamw" or training.lora is not None
    if offloads and not training.weights_on_host and world.device == "cuda":
        helps.append("weights on the host, too (tandem.offload=weights)")
    if stand_in.dtype == torch.float32:
        helps.append("bfloat16 (TANDEM_TRAINER_DTYPE)")
    return helps
