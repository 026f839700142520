"""What a backend does for a rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from tandem.settings import TrainerSettings
from tandem.worker import TrainingSpec
from trainer_service.microbatch import MicroBatch
from trainer_service.model import ModelFacts

if TYPE_CHECKING:
    from torch import Tensor

    from trainer_service.lanes import Gradients
    from trainer_service.optimizers import Optimizer


@dataclass(frozen=True)
class World:
    """A rank's place: `device` is "cpu" or "cuda", the rank's own one being set already."""

    rank: int
    size: int
    device: str


class TrainerBackend(Protocol):
    """One rank's share of a model. Each method is called on all ranks in the same order."""

    facts: ModelFacts
    training: TrainingSpec
    dtype: str
    device: str
    optimizer: Optimizer
    packs: bool
    """Whether micro-batches come packed; else padded."""

    def __init__(
        self,
        *,
        model_path: Path,
        settings: TrainerSettings,
        world: World,
        training: TrainingSpec | None = None,
    ) -> None:
        """`training` None: all parameters, by AdamW. Raises `UnsuitableLora`."""
        ...

    def logprobs(self, micro_batch: MicroBatch, *, gradients: bool) -> Tensor:
        """Log probabilities of the targets, float32 [e]; ready for `backward` if asked for."""
        ...

    def backward(self, loss: Tensor) -> None:
        """Adds the gradients of a rank's own loss; what is held is the sum over ranks."""
        ...

    def gradients(self, loss: Tensor) -> Gradients:
        """The gradients of a loss alone, added to nothing: for lanes, side by side in threads."""
        ...

    def accumulate(self, gradients: Gradients) -> None:
        """Adds what `gradients` returned to what is held."""
        ...

    @property
    def threadsafe(self) -> bool:
        """Whether `logprobs`, `inputs` and `gradients` may run in several threads at once."""
        ...

    def inputs(self, micro_batch: MicroBatch) -> dict[str, Tensor]:
        """The loss inputs of a micro-batch on the backend's device."""
        ...

    def collect(self, *, dtype: str, owned_by_me: Callable[[str], bool]) -> dict[str, Tensor]:
        """Whole tensors that this rank owns, on the CPU, under the names of the model's own
        files; of a LoRA run, with the adapter added in. `owned_by_me` is asked with the names
        of `tensor_sizes`."""
        ...

    def tensor_sizes(self) -> Mapping[str, int]:
        """Units that one rank must own as a whole, with their number of elements."""
        ...

    def collect_adapter(self) -> dict[str, Tensor]:
        """Of a LoRA run: rank 0 gets the whole adapter, float32, on the CPU, under the names of
        PEFT's files; the others nothing."""
        ...

    def adapter_targets(self) -> Sequence[str]:
        """Of a LoRA run: PEFT's `target_modules`, which name the adapted layers exactly."""
        ...

    @property
    def unties_head(self) -> bool:
        """Whether `collect` gives a weight of its own to a head that shares the embedding's,
        because an adapter was added to it."""
        ...

    def parameters(self) -> dict[str, Tensor]:
        """The live tensors that a checkpoint holds, by name, perhaps sharded: all parameters and
        buffers, or those of the adapter."""
        ...
