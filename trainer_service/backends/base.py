"""What a trainer backend does, and how one is found by its name."""

from __future__ import annotations

import enum
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from tandem.backends.memory import MemoryPlan
from tandem.backends.registry import known_backends, registered
from tandem.errors import UnsupportedByBackend, WorkerStartFailed
from tandem.protocol.worker import TrainingSpec
from tandem.settings.workers import TrainerSettings
from trainer_service.backends.loop import Done, ShareResult, compute_share
from trainer_service.batches.micro_batches import MicroBatch, RankPlan
from trainer_service.batches.validation import Batch
from trainer_service.losses.base import LossResult
from trainer_service.models.huggingface import ModelFacts
from trainer_service.optimizers import Optimizer

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Parameter


Gradients = list["Tensor | None"]
"""One for each trainable parameter; None where a loss does not depend on it."""

Objective = Callable[["Tensor"], LossResult]
"""Log probabilities [e] of a micro-batch to its loss."""

Mark = list[tuple["Parameter", "Tensor | None", int]]
"""Trainable parameters with their gradients, and how often each gradient was written to."""


class Capability(enum.StrEnum):
    """What a backend may be able to do besides. A trainer is refused before its start if its run
    needs one that the backend does not have."""

    SLEEP = "let its state leave the device between two operations"
    """`live_state` (`compute/offload.py`)."""
    ADAPTERS = "train adapters"
    """`export_adapter`, `adapter_targets`, and `share` and `activate` for several runs of one
    model."""
    LAYOUTS = "copy a model, divide its matrices among ranks, or keep its weights on the host"
    """More than one of `training.layout.replicas` or `training.layout.tensor_parallel`, and
    `training.weights_on_host`."""


@dataclass(frozen=True)
class LiveState:
    """The tensors that live between operations, in the order in which they leave the device; of
    sharded ones, this rank's shards."""

    optimizer: Sequence[Tensor]
    gradients: Sequence[Tensor]
    parameters: Sequence[Tensor]


@dataclass(frozen=True)
class Export:
    """A tensor of a published model, as it is named and shaped in the model's own files. Those with
    the same `unit` are made together, and exported by the same rank."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    unit: str

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * int(self.dtype.itemsize)


@dataclass(frozen=True)
class World:
    """This rank among all. `device` is "cpu" or "cuda"; on "cuda" the rank's own GPU is the
    current one."""

    rank: int
    size: int
    device: str
    on_node: int = 0
    """How many ranks there are on this one's host; 0: all."""


class TrainerBackend(ABC):
    """One rank's share of a model: this is the page from which to write a backend.

    **What it is.** A class whose constructor loads a model for one rank. There are as many
    processes as `world.size`; if more than one, they are a process group of torch when the
    constructor is called. All ranks call each method in the same order, one at a time, so that a
    method may use collectives wherever nothing else is said. What comes before and after is not a
    backend's concern: requests are validated, batches divided, results gathered, operations
    applied once, files written and committed by others.

    **What it must have.** A constructor that sets the attributes below, and four more methods:

    | for | methods |
    |---|---|
    | computing | `logprobs`; the default `forward_backward` makes everything else of it |
    | steps | `optimizer` (`make_optimizer`); `sum_gradients`, if `backward` does not sum them |
    | checkpoints | `parameters`; the optimizer's state goes with them |
    | publishing | `exports`, `export_weights` |

    A backend with `mark` and `undo` goes on after a batch for which memory ran out.

    A backend whose gradients come about in another way overrides the nearest of these:

        backward           what to do with the loss of a micro-batch
        loss_of            the loss and its log probabilities, for gradients in one go
        forward_backward   the whole loop: a pipeline, one fused call

    **What it may have.** `capabilities` names what it can do besides; each comes with methods that
    otherwise raise `UnsupportedByBackend`. A class says what it can, an instance may take some
    back (`self.capabilities -= {Capability.SLEEP}`) once its model is loaded.

    **What holds.** A loss is a sum over datums, so gradients are summed, over ranks too, never
    averaged: N ranks must compute what one computes. The same operations give the same bits.
    A rank without datums takes part in its collectives all the same.

    **Where it goes.** `BACKEND = ThatClass` in a module `NAME` of this folder; or, in a
    package of its own, an entry point of the group `tandem.trainer_backends`, as that in
    `tests/support/plain_backend`, of 80 lines. A run names it (`tandem.backend` in its
    `user_metadata`); for those that do not, `TANDEM_TRAINER_BACKEND` does.
    """

    capabilities: frozenset[Capability] = frozenset()
    facts: ModelFacts
    """What is told of the model, and what requests are validated against."""
    training: TrainingSpec
    dtype: str
    """"float32" or "bfloat16", of the computation and of published weights."""
    device: str
    optimizer: Optimizer
    threads: bool = False
    """Whether several threads may compute micro-batches at once: `logprobs`, `loss_of`, `inputs`
    and `gradients` are thread-safe then, and the loop calls `accumulate`."""
    packs: bool = False
    """Whether micro-batches come packed into one row instead of padded."""
    plan: MemoryPlan | None = None
    """The tokens of a micro-batch that fit into memory, if the backend plans it
    (`tandem/backends/memory.py`)."""

    @abstractmethod
    def __init__(
        self,
        *,
        model_path: Path,
        settings: TrainerSettings,
        world: World,
        training: TrainingSpec | None = None,
    ) -> None:
        """Loads the model. `training` None: all parameters, by AdamW. Raises `UnsuitableLora`
        for a LoRA run that the model does not allow."""

    # --- Computing -------------------------------------------------------------------------

    def forward_backward(self, batch: Batch, share: RankPlan, *, done: Done) -> ShareResult:
        """Computes this rank's share of a batch, and adds the gradients of its loss to those held
        unless the batch is `forward_only`. `share` is the datums of one micro-batch after the
        other, as many on each rank; `done` is told the tokens of each.

        Raises `MicroBatchTooLarge` where memory runs out.
        """
        return compute_share(self, batch, share, keep=self.backward, done=done)

    @abstractmethod
    def logprobs(self, micro_batch: MicroBatch, *, gradients: bool) -> Tensor:
        """Log probabilities of the targets, float32 [e], differentiable if `gradients`."""

    def loss_of(
        self, micro_batch: MicroBatch, objective: Objective, *, by_entry: bool
    ) -> tuple[Tensor, LossResult]:
        """The log probabilities [e] of the targets, without gradient, and what `objective` makes of
        them, whose `loss` is differentiable. `by_entry`: the objective is a loss by entry."""
        logprobs = self.logprobs(micro_batch, gradients=True)
        return logprobs.detach(), objective(logprobs)

    @property
    def warm(self) -> bool:
        """Whether `warm_up` would have nothing to do."""
        return True

    def warm_up(self) -> None:
        """Called on all ranks before a trainer is ready, and before the first batch of each run
        that came later, on a thread that computes: the backend can compile what it will compute
        with. Collectives, also of `groups`, may take `WARM_UP_TIMEOUT` meanwhile."""
        return

    @property
    def groups(self) -> Sequence[dist.ProcessGroup]:
        """Of its collectives, besides that of all ranks."""
        return []

    def backward(self, loss: Tensor) -> None:
        """Adds the gradients of this rank's `loss` to those held."""
        loss.backward()

    def gradients(self, loss: Tensor) -> Gradients:
        """Return the gradients of `loss` alone. Only where `threads` is true."""
        raise NotImplementedError

    def accumulate(self, gradients: Gradients) -> None:
        """Add the result of `gradients` to the gradients held. Only where `threads` is true."""
        raise NotImplementedError

    def mark(self) -> Mark | None:
        """What `undo` needs to know of the gradients held; None: this backend cannot undo. Asked of
        a single rank alone, before each batch."""
        return None

    def undo(self, mark: Mark) -> bool:
        """Forgets what was computed since the mark, and frees its memory. Returns whether the
        gradients held are those of the mark, bit for bit: what was added to one is lost in it."""
        return False

    def sum_gradients(self) -> None:
        """Called before each step. The gradients held are sums over ranks afterwards; backends
        whose `backward` sums them have nothing to do."""
        return

    def weights_changed(self) -> None:
        """Called after each step, and after a load into `parameters`: what the backend computes
        with may be made of them."""
        return

    def inputs(self, micro_batch: MicroBatch) -> dict[str, Tensor]:
        """The loss inputs of a micro-batch on the backend's device, [e] each."""
        return {name: self.to_device(values) for name, values in micro_batch.inputs.items()}

    def to_device(self, values: object) -> Tensor:
        """A NumPy array as a tensor on the backend's device."""
        return to_device(values, self.device)

    # --- Weights ---------------------------------------------------------------------------

    @abstractmethod
    def parameters(self) -> dict[str, Tensor]:
        """The live tensors that a checkpoint holds, by name, possibly sharded: all parameters
        and persistent buffers, or those of the adapter."""

    @abstractmethod
    def exports(self) -> Sequence[Export]:
        """The tensors of the whole model as it is published, alike on all ranks. (A LoRA run
        publishes its adapter instead.)"""

    @abstractmethod
    def export_weights(self, units: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors of these units, in the order of `exports`, by name. One need only be there
        until the next is asked for, so that no rank holds the model. All ranks go to the end."""

    # --- Capabilities ----------------------------------------------------------------------

    def live_state(self) -> LiveState:
        """SLEEP: everything that must outlast the sleep: parameters, frozen ones too, buffers,
        gradients and optimizer state. What else there is on the device, such as gathered
        parameters, is freed by this call."""
        raise self.cannot(Capability.SLEEP)

    def export_adapter(self) -> Mapping[str, Tensor]:
        """ADAPTERS: on rank 0 the whole adapter, float32, with the keys of PEFT's files; on other
        ranks nothing."""
        raise self.cannot(Capability.ADAPTERS)

    def adapter_targets(self) -> Sequence[str]:
        """ADAPTERS: PEFT's `target_modules`, naming exactly the adapted layers."""
        raise self.cannot(Capability.ADAPTERS)

    def share(self, training: TrainingSpec) -> TrainerBackend:
        """ADAPTERS: the backend of another run, with adapters and an optimizer of its own upon the
        same model. Raises `UnsuitableLora`, or `InvalidRequest` where runs cannot share a model."""
        raise self.cannot(Capability.ADAPTERS)

    def activate(self) -> None:
        """ADAPTERS: called before each operation of the run."""
        return

    @classmethod
    def cannot(cls, what: Capability) -> UnsupportedByBackend:
        """The error that says so."""
        return UnsupportedByBackend(f"the trainer backend {cls.__name__} cannot {what}")


def to_device(values: object, device: str) -> Tensor:
    """A NumPy array as a tensor on a device."""
    return torch.from_numpy(values).to(device, non_blocking=True)


def add_gradients(held: Gradients, more: Gradients) -> Gradients:
    """Adds `more` to `held`, in place where both are tensors. Returns the sum."""
    both = [(a, b) for a, b in zip(held, more, strict=True) if a is not None and b is not None]
    if both:
        torch._foreach_add_([a for a, _ in both], [b for _, b in both])
    return [b if a is None else a for a, b in zip(held, more, strict=True)]


def backend_named(name: str) -> type[TrainerBackend]:
    """The backend of this package or of an installed one.

    Raises `WorkerStartFailed`, which lists the known names, or those who register this one.
    """
    known = known_backends()
    if name not in known:
        raise WorkerStartFailed(f"unknown trainer backend {name!r}; known: {', '.join(known)}")
    if known[name]:
        raise WorkerStartFailed(known[name])
    found: type[TrainerBackend]
    if points := registered(name):
        found = points[0].load()
    else:
        found = import_module(f"trainer_service.backends.{name}").BACKEND
    return found
