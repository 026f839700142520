"""What a trainer backend does, and how one is found by its name."""

from __future__ import annotations

import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch

from tandem.errors import InvalidRequest, WorkerStartFailed
from tandem.settings import TrainerSettings
from tandem.worker import TrainingSpec
from trainer_service.batches.micro_batches import MicroBatch
from trainer_service.losses.base import LossResult
from trainer_service.models.huggingface import ModelFacts
from trainer_service.optimizers import Optimizer

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Parameter

ENTRY_POINT_GROUP = "tandem.trainer_backends"

Gradients = list["Tensor | None"]
"""One for each trainable parameter; None where a loss does not depend on it."""

Objective = Callable[["Tensor"], LossResult]
"""Log probabilities [e] of a micro-batch to its loss."""

Mark = list[tuple["Parameter", "Tensor | None", int]]
"""Trainable parameters with their gradients, and how often each gradient was written to."""


@dataclass(frozen=True)
class LiveState:
    """The tensors that live between operations, in the order in which they leave the device; of
    sharded ones, this rank's shards."""

    optimizer: Sequence[Tensor]
    gradients: Sequence[Tensor]
    parameters: Sequence[Tensor]


@dataclass(frozen=True)
class World:
    """This rank among all. `device` is "cpu" or "cuda"; on "cuda" the rank's own GPU is the
    current one."""

    rank: int
    size: int
    device: str


class TrainerBackend(ABC):
    """One rank's share of a model. All ranks call each method in the same order.

    `dtype` ("float32" or "bfloat16") is that of the computation and of published weights;
    `packs` says whether micro-batches come packed into one row instead of padded.
    """

    facts: ModelFacts
    training: TrainingSpec
    dtype: str
    device: str
    optimizer: Optimizer
    packs: bool = False

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
        for a LoRA run that the model or the backend does not allow."""

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

    @abstractmethod
    def parameters(self) -> dict[str, Tensor]:
        """The live tensors that a checkpoint holds, by name, possibly sharded: all parameters
        and persistent buffers, or those of the adapter."""

    @abstractmethod
    def tensor_sizes(self) -> Mapping[str, int]:
        """Number of elements of each unit that one rank must write as a whole."""

    @abstractmethod
    def collect(self, *, dtype: str, owned_by_me: Callable[[str], bool]) -> dict[str, Tensor]:
        """Whole tensors that this rank writes, on the CPU, named as in the model's own files; in
        a LoRA run with the adapter merged in. `owned_by_me` takes names of `tensor_sizes`."""

    def inputs(self, micro_batch: MicroBatch) -> dict[str, Tensor]:
        """The loss inputs of a micro-batch on the backend's device, [e] each."""
        return {name: self.to_device(values) for name, values in micro_batch.inputs.items()}

    def to_device(self, values: object) -> Tensor:
        """A NumPy array as a tensor on the backend's device."""
        return torch.from_numpy(values).to(self.device, non_blocking=True)

    def backward(self, loss: Tensor) -> None:
        """Adds the gradients of this rank's `loss` to those held."""
        loss.backward()

    def sum_gradients(self) -> None:
        """Called before each step. The gradients held are sums over ranks afterwards; backends
        whose `backward` sums them have nothing to do."""
        return

    def share(self, training: TrainingSpec) -> TrainerBackend:
        """The backend of another run, with adapters and an optimizer of its own upon the same
        model. Raises `UnsuitableLora`, or `InvalidRequest` where runs cannot share a model."""
        raise InvalidRequest(
            "this trainer's model is trained by one run, and another one cannot share it: only "
            "LoRA runs share a model"
        )

    def activate(self) -> None:
        """Called before each operation of the run, once it shares the model with others."""
        return


@runtime_checkable
class ParallelBackend(Protocol):
    """A backend that can compute several micro-batches at once, in threads of one process."""

    @property
    def threadsafe(self) -> bool:
        """Whether `logprobs`, `inputs` and `gradients` may run in several threads at once."""
        ...

    def gradients(self, loss: Tensor) -> Gradients:
        """The gradients of `loss` alone, added to nothing."""
        ...

    def accumulate(self, gradients: Gradients) -> None:
        """Adds what `gradients` returned to the gradients held."""
        ...


@runtime_checkable
class UndoingBackend(Protocol):
    """A backend that can go on after a computation that failed in the middle, on a single rank."""

    def mark(self) -> Mark:
        """What `undo` needs to know of the gradients held."""
        ...

    def undo(self, mark: Mark) -> bool:
        """Forgets what was computed since the mark, and frees its memory. Returns whether the
        gradients held are those of the mark, bit for bit: what was added to one is lost in it."""
        ...


@runtime_checkable
class SleepingBackend(Protocol):
    """A backend whose state can leave the device between two operations (`compute/offload.py`)."""

    def live_state(self) -> LiveState:
        """Everything that must outlast the sleep: parameters, frozen ones too, buffers, gradients
        and optimizer state. What else there is on the device, such as gathered parameters, is
        freed by this call."""
        ...


@runtime_checkable
class LoraBackend(Protocol):
    """A backend that trains and publishes LoRA adapters."""

    def collect_adapter(self) -> dict[str, Tensor]:
        """On rank 0 the whole adapter, float32 on the CPU, with the keys of PEFT's files; on
        other ranks nothing."""
        ...

    def adapter_targets(self) -> Sequence[str]:
        """PEFT's `target_modules`, naming exactly the adapted layers."""
        ...

    @property
    def unties_head(self) -> bool:
        """Whether `collect` gives a head that shares the embedding's weight one of its own,
        because it has an adapter."""
        ...


def add_gradients(held: Gradients, more: Gradients) -> Gradients:
    """Adds `more` to `held`, in place where both are tensors. Returns the sum."""
    both = [(a, b) for a, b in zip(held, more, strict=True) if a is not None and b is not None]
    if both:
        torch._foreach_add_([a for a, _ in both], [b for _, b in both])
    return [b if a is None else a for a, b in zip(held, more, strict=True)]


def backend_named(name: str) -> type[TrainerBackend]:
    """The backend of this package or of an installed one.

    Raises `WorkerStartFailed`, which lists the known names.
    """
    here = [module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)])]
    here.remove("base")
    if name in here:
        own: type[TrainerBackend] = import_module(f"trainer_service.backends.{name}").BACKEND
        return own
    points = {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}
    if name in points:
        installed: type[TrainerBackend] = points[name].load()
        return installed
    known = ", ".join(sorted({*here, *points}))
    raise WorkerStartFailed(f"unknown trainer backend {name!r}; known: {known}")
