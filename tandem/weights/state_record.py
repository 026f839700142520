"""The record of a trainer's saved state: `checkpoint.json`, written last."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from tandem.protocol.worker import TrainingSpec
from tandem.weights.manifest import FileEntry

RECORD_NAME = "checkpoint.json"


class CheckpointRecord(BaseModel):
    """`parameters` maps each name to its whole shape. There is no `optimizer` state before the
    first step.

    `base_model` and `base_fingerprint` identify a LoRA run's base model. A restored trainer keeps
    the plan `micro_batch_tokens`, because larger micro-batches may have run out of memory."""

    model_config = ConfigDict(frozen=True)

    format: int = 1
    run_id: str
    step: int = Field(ge=0, lt=2**63)
    last_seq_id: int = Field(ge=0, lt=2**63)
    architecture: str
    optimizer: bool
    training: TrainingSpec = TrainingSpec()
    base_model: str = ""
    base_fingerprint: str = ""
    micro_batch_tokens: int = Field(default=0, ge=0)
    parameters: dict[str, list[int]]
    files: list[FileEntry]

    @property
    def bytes(self) -> int:
        return sum(entry.bytes for entry in self.files)
