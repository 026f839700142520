"""Decides whether a run can load a checkpoint."""

from __future__ import annotations

from typing import Literal

from tandem.errors import CheckpointMismatch
from tandem.protocol.worker import LoraSpec, TrainingSpec

Optimizer = Literal["adamw", "dimuon"]


def check_compatible(
    *, path: str, saved: TrainingSpec, here: TrainingSpec, optimizer: bool
) -> None:
    """Raise `CheckpointMismatch` if a run that trains `here` cannot load a checkpoint of a run that
    trained `saved`. `optimizer` requests its optimizer state too."""
    if saved.lora is None and here.lora is not None:
        raise CheckpointMismatch(
            f"{path!r} holds all parameters of its model, and this run trains a LoRA adapter; "
            "make a run from it with create_training_client_from_state"
        )
    if saved.lora is not None and here.lora is None:
        raise CheckpointMismatch(
            f"{path!r} holds a LoRA adapter of {_describe(saved.lora)}, and this run trains all "
            "parameters; make a run from it with create_training_client_from_state"
        )
    if saved.lora is not None and here.lora is not None and not _same_shape(saved.lora, here.lora):
        raise CheckpointMismatch(
            f"{path!r} holds a LoRA adapter of {_describe(saved.lora)}, and this run trains one "
            f"of {_describe(here.lora)}"
        )
    if optimizer and saved.optimizer != here.optimizer:
        raise CheckpointMismatch(
            f"{path!r} holds the state of the optimizer {saved.optimizer}, and this run uses "
            f"{here.optimizer}; load the weights without it"
        )


def training_from(
    *, path: str, saved: TrainingSpec, full: bool, optimizer: bool, asked: Optimizer | None
) -> TrainingSpec:
    """Return the training of a new run from a checkpoint of a run that trained `saved`.

    `full` requests full-parameter training, `optimizer` the optimizer state. `asked` is the
    client's optimizer; the default is AdamW. Raises `CheckpointMismatch`."""
    if optimizer and asked not in (None, saved.optimizer):
        raise CheckpointMismatch(
            f"{path!r} holds the state of the optimizer {saved.optimizer}, and {asked} was asked "
            "for; load the weights without it, with create_training_client_from_state"
        )
    if full and saved.lora is not None:
        raise CheckpointMismatch(
            f"{path!r} holds a LoRA adapter of {_describe(saved.lora)}, from which no run of all "
            "parameters can be made; leave the suffix of the model's name out"
        )
    return TrainingSpec(
        lora=saved.lora, optimizer=saved.optimizer if optimizer else asked or "adamw"
    )


def _describe(lora: LoraSpec) -> str:
    """Example: "rank 32 on attention, mlp and unembedding"."""
    kinds = [kind for kind in ("attention", "mlp", "unembedding") if getattr(lora, kind)]
    listed = ", ".join(kinds[:-1]) + " and " + kinds[-1] if len(kinds) > 1 else "".join(kinds)
    return f"rank {lora.rank} on {listed}"


def _same_shape(one: LoraSpec, other: LoraSpec) -> bool:
    """Compare all but the seed, which only matters for initial weights."""
    return one.model_copy(update={"seed": other.seed}) == other
