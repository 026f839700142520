from __future__ import annotations

import enum
import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from tandem.backends.memory import MemoryPlan
from tandem.backends.registry import REFUSED, backends_of_runs, descriptions
from tandem.errors import UnsupportedByBackend, WorkerStartFailed, describe
from tandem.protocol.worker import TrainingSpec
from tandem.settings.workers import TrainerSettings
from trainer_service.backends.loop import (
    Done,
    MicroBatchBackend,
    MicroBatchTask,
    Objective,
    ShareResult,
    compute_share,
)
from trainer_service.batches.micro_batches import MicroBatch, RankPlan
from trainer_service.batches.validation import Batch
from trainer_service.losses.base import LossResult
from trainer_service.models.huggingface import ModelFacts
from trainer_service.optimizers import Optimizer

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Parameter


Gradients = list["Tensor | None"]
"""One for each trainable parameter, None if a loss does not depend on it."""

Mark = list[tuple["Parameter", "Tensor | None", int]]
"""Trainable parameters with their gradients, and each gradient's version (number of writes)."""


class Capability(enum.StrEnum):
    """Optional abilities of a backend. A run that needs a missing one is refused at its start."""

    SLEEP = "let its state leave the device between two operations"
    """`live_state` (`compute/offload.py`)."""
    ADAPTERS = "train adapters"
    """`export_adapter`, `adapter_targets`, and `share` and `activate` for several runs of one
    model."""
    LAYOUTS = "copy a model, divide its matrices among ranks, or keep its weights on the host"
    """Several replicas or tensor-parallel ranks in `training.layout`, and
    `training.weights_on_host`."""


@dataclass(frozen=True)
class LiveState:
    """The tensors or shards that live between operations, in their order of leaving the device."""

    optimizer: Sequence[Tensor]
    gradients: Sequence[Tensor]
    parameters: Sequence[Tensor]


@dataclass(frozen=True)
class Export:
    """A tensor of a published model, with its name and shape in the model's own files.

    One rank makes and exports all tensors of a `unit`."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    unit: str

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * int(self.dtype.itemsize)


@dataclass(frozen=True)
class World:
    """`device` is "cpu" or "cuda". On "cuda" this rank's GPU is the current one."""

    rank: int
    size: int
    device: str
    on_node: int = 0
    """The number of ranks on this host. 0: all."""


class TrainerBackend(ABC):
    """One rank's share of a model. This docstring is the guide to writing a backend.

    **Class.** The constructor loads a model for one rank. Several ranks already form a torch
    process group. All ranks call each method in the same order, one at a time, so a method may use
    collectives. Requests, batches, results and files are the work of other parts.

    **Required.** A constructor that sets the attributes below, and these methods:

    | for | methods |
    |---|---|
    | computing | `logprobs`; the default `forward_backward` builds on it |
    | steps | `optimizer` (`make_optimizer`); `sum_gradients`, if `backward` does not sum them |
    | checkpoints | `parameters`; the optimizer's state goes with them |
    | publishing | `exports`, `export_weights` |

    A backend with `mark` and `undo` continues after a batch that ran out of memory.

    A backend that computes gradients in another way overrides the nearest of these:

        backward           use the loss of a micro-batch
        loss_of            the loss and its log probabilities, for gradients in one go
        forward_backward   the whole loop: a pipeline, one fused call

    **Optional.** Methods of further `capabilities` otherwise raise `UnsupportedByBackend`. An
    instance may remove some after loading its model (`self.capabilities -= {Capability.SLEEP}`).

    **Guarantees.** A loss is a sum over datums, so gradients are summed over ranks, never averaged:
    N ranks must compute what one computes. Equal operations give equal bits. A rank without datums
    still takes part in its collectives.

    **Registration.** A torch-free description with the import path of the class
    (`tandem/backends/description.py`; example: `tests/support/plain_backend`). A run names its
    backend in `tandem.backend` of its `user_metadata`. The default is `TANDEM_TRAINER_BACKEND`."""

    capabilities: frozenset[Capability] = frozenset()
    facts: ModelFacts
    training: TrainingSpec
    dtype: str
    """The type of the computation and of published weights: "float32" or "bfloat16"."""
    device: str
    optimizer: Optimizer
    threads: bool = False
    """True if several threads may compute at once. Then `logprobs`, `loss_of`, `inputs` and
    `gradients` are thread-safe, and the loop calls `accumulate`."""
    packs: bool = False
    """Micro-batches come packed into one row instead of padded."""
    plan: MemoryPlan | None = None
    """The tokens of a micro-batch that fit into memory (`tandem/backends/memory.py`)."""

    @abstractmethod
    def __init__(
        self,
        *,
        model_path: Path,
        settings: TrainerSettings,
        world: World,
        training: TrainingSpec | None = None,
    ) -> None:
        """Load the model. `training` None: all parameters, by AdamW. Raises `UnsuitableLora`."""

    # --- Computing -------------------------------------------------------------------------

    def forward_backward(self, batch: Batch, share: RankPlan, *, done: Done) -> ShareResult:
        """Compute this rank's share of a batch, and add the gradients of its loss to the held ones.

        A `forward_only` batch adds none. `share` lists the datums of each micro-batch, equally many
        on every rank. `done` is called with the tokens of each. Raises `MicroBatchTooLarge`."""
        return compute_share(self, batch, share, keep=self.backward, done=done)

    @abstractmethod
    def logprobs(self, micro_batch: MicroBatch, *, gradients: bool) -> Tensor:
        """Log probabilities of the targets, float32 [e], differentiable if `gradients`."""

    def loss_of(
        self, micro_batch: MicroBatch, objective: Objective, *, by_entry: bool
    ) -> tuple[Tensor, LossResult]:
        """Return the targets' log probabilities [e], without gradient, and `objective` of them.

        The result's `loss` is differentiable. `by_entry`: see `Loss.by_entry`."""
        logprobs = self.logprobs(micro_batch, gradients=True)
        return logprobs.detach(), objective(logprobs)

    def joins(self, tokens: int, *, by_entry: bool) -> bool:
        """ADAPTERS: True if a micro-batch of `tokens` can share a pass with those of other runs."""
        return False

    def losses_of(
        self, runs: Sequence[MicroBatchBackend], tasks: Sequence[MicroBatchTask]
    ) -> list[tuple[Tensor, LossResult]]:
        """ADAPTERS: as `loss_of` for the tasks of several `runs` of this model, in one pass.

        Only if each `joins`, within `joint_pass`. Thread-safe if `threads`."""
        raise self.cannot(Capability.ADAPTERS)

    def joint_pass(self) -> AbstractContextManager[None]:
        """ADAPTERS: within the block, `losses_of` is called, also by other threads."""
        raise self.cannot(Capability.ADAPTERS)

    @property
    def trained(self) -> Sequence[Parameter]:
        """The trained parameters, in the order of `gradients`. Only if it `joins`."""
        raise self.cannot(Capability.ADAPTERS)

    @property
    def warm(self) -> bool:
        """True if `warm_up` has nothing to do."""
        return True

    def warm_up(self) -> None:
        """Compile the code for later batches, on a computing thread of all ranks.

        Meanwhile collectives, also of `groups`, may take `WARM_UP_TIMEOUT`."""
        return

    @property
    def groups(self) -> Sequence[dist.ProcessGroup]:
        """The process groups of its collectives, besides that of all ranks."""
        return []

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of this rank's `loss` to the held ones."""
        loss.backward()

    def gradients(self, loss: Tensor) -> Gradients:
        """Return the gradients of `loss` for `accumulate`. Only if `threads`."""
        raise NotImplementedError

    def accumulate(self, gradients: Gradients) -> None:
        """Add results of `gradients` to the held gradients. Only if `threads`."""
        raise NotImplementedError

    def checkpoint(self, tokens: int) -> bool:
        """Checkpoint the blocks of micro-batches of at least `tokens` tokens from now on.

        Returns False if they already are, or cannot be. It must not change the bits."""
        return False

    def mark(self) -> Mark | None:
        """Record the held gradients for `undo`. None: this backend cannot undo. Only for a single
        rank."""
        return None

    def undo(self, mark: Mark) -> bool:
        """Forget the computation since the mark, and free its memory.

        Returns True if the held gradients are those of the mark, bit for bit."""
        return False

    def sum_gradients(self) -> None:
        """Sum the held gradients over ranks, before each step. A no-op if `backward` sums them."""
        return

    def weights_changed(self) -> None:
        """Refresh weights derived from `parameters`, after each step and each load."""
        return

    def inputs(self, micro_batch: MicroBatch) -> dict[str, Tensor]:
        """The loss inputs of a micro-batch on the backend's device, [e] each."""
        return {name: self.to_device(values) for name, values in micro_batch.inputs.items()}

    def to_device(self, values: object) -> Tensor:
        return to_device(values, self.device)

    # --- Weights ---------------------------------------------------------------------------

    @abstractmethod
    def parameters(self) -> dict[str, Tensor]:
        """The live tensors of a checkpoint, by name: parameters and persistent buffers, or the
        adapter's."""

    @abstractmethod
    def exports(self) -> Sequence[Export]:
        """The tensors of the published whole model, equal on all ranks. LoRA runs publish the
        adapter."""

    @abstractmethod
    def export_weights(self, units: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors of these units, by name, in the order of `exports`. All ranks iterate to
        the end."""

    @property
    def exports_stay(self) -> bool:
        """True if exported tensors stay as they are until the next operation. Then a rank exports
        alone, and several threads write its files."""
        return False

    # --- Capabilities ----------------------------------------------------------------------

    def live_state(self) -> LiveState:
        """SLEEP: parameters, buffers, gradients and optimizer state. Frees other device memory."""
        raise self.cannot(Capability.SLEEP)

    def export_adapter(self) -> Mapping[str, Tensor]:
        """ADAPTERS: on rank 0 the whole adapter, float32, with the keys of PEFT's files. Else
        empty."""
        raise self.cannot(Capability.ADAPTERS)

    def adapter_targets(self) -> Sequence[str]:
        """ADAPTERS: PEFT's `target_modules`."""
        raise self.cannot(Capability.ADAPTERS)

    def share(self, training: TrainingSpec) -> TrainerBackend:
        """ADAPTERS: the backend of another run on this model.

        Raises `UnsuitableLora`, or `InvalidRequest` if the runs cannot share a model."""
        raise self.cannot(Capability.ADAPTERS)

    def activate(self) -> None:
        """ADAPTERS: called before each operation of the run."""
        return

    @classmethod
    def cannot(cls, what: Capability) -> UnsupportedByBackend:
        return UnsupportedByBackend(
            f"the trainer backend {cls.__name__} cannot {what}; create the run with another one "
            "(tandem.backend)"
        )


def to_device(values: object, device: str) -> Tensor:
    return torch.from_numpy(values).to(device, non_blocking=True)


def add_gradients(held: Gradients, more: Gradients) -> Gradients:
    """Add `more` to `held`, in place if both are tensors. Return the sum."""
    both = [(a, b) for a, b in zip(held, more, strict=True) if a is not None and b is not None]
    if both:
        torch._foreach_add_([a for a, _ in both], [b for _, b in both])
    return [b if a is None else a for a, b in zip(held, more, strict=True)]


def backend_named(name: str) -> type[TrainerBackend]:
    """Import a step backend's class. Raises `WorkerStartFailed` for an unknown or unusable name."""
    if name in REFUSED:
        raise WorkerStartFailed(REFUSED[name])
    known = backends_of_runs()
    if name not in known:
        usable = [each for each, reason in known.items() if not reason]
        raise WorkerStartFailed(f"unknown trainer backend {name!r}; known: {', '.join(usable)}")
    described = descriptions()[name]
    if known[name] or isinstance(described, str):
        raise WorkerStartFailed(known[name])
    try:
        found: type[TrainerBackend] = resolve_name(described.implementation)
    except (ImportError, AttributeError, ValueError) as error:
        raise WorkerStartFailed(
            f"the trainer backend {name!r} has no {described.implementation}: {describe(error)}"
        ) from error
    return found
