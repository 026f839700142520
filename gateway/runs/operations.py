"""What an operation is, and the bodies of those that come as JSON."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr

from gateway.auth.identity import Readers
from gateway.futures.table import Future, Outcome
from gateway.sessions.metadata import TextMetadata
from gateway.usage.meter import UsageKind
from tandem.errors import TandemError

Kind = Literal[
    "create_model",
    "forward",
    "forward_backward",
    "optim_step",
    "save_weights",
    "save_weights_for_sampler",
    "save_weights_external",
    "load_weights",
]


class AdamParams(BaseModel):
    """The defaults are those of the SDK, which always sends all of them."""

    model_config = ConfigDict(allow_inf_nan=False)

    learning_rate: float = Field(1e-4, ge=0)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    eps: float = Field(1e-12, ge=0)
    weight_decay: float = Field(0.0, ge=0)
    grad_clip_norm: float = Field(0.0, ge=0)


class DimuonParams(BaseModel):
    """As the SDK has them; a `grad_clip_norm` of 0 or less turns clipping off."""

    model_config = ConfigDict(allow_inf_nan=False, extra="forbid")

    type: Literal["dimuon"] = "dimuon"
    learning_rate: float = Field(ge=0)
    grad_clip_norm: float = 0.0
    beta1: float = Field(0.9, ge=0, lt=1)


class OptimStep(BaseModel):
    params: AdamParams | DimuonParams


class LossReference(BaseModel):
    """The loss of a forward_backward that names, by id, a definition registered beforehand."""

    loss_fn: str
    loss_id: str


class SaveWeights(BaseModel):
    path: str
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: TextMetadata | None = None


class SaveWeightsForSampler(BaseModel):
    """Named by `path`, or ephemeral by `sampling_session_seq_id`."""

    path: str | None = None
    sampling_session_seq_id: int | None = Field(None, ge=0, le=2**53)
    kind: Literal["snapshot", "inflight"] = "snapshot"
    ttl_seconds: int | None = None
    user_metadata: TextMetadata | None = None


class SaveWeightsExternal(BaseModel):
    """`age_encryption_recipients`: every file is encrypted to each of these keys."""

    path: str
    ttl_seconds: int | None = None
    age_encryption_recipients: list[str] | None = None


class LoadWeights(BaseModel):
    path: str
    optimizer: bool = False
    _readers: Readers | None = PrivateAttr(None)

    def on_behalf_of(self, readers: Readers) -> LoadWeights:
        """The checkpoint may not be there yet: who may read it is looked at when it is loaded."""
        self._readers = readers
        return self

    @property
    def readers(self) -> Readers:
        assert self._readers is not None, "a load without anybody who asked for it"
        return self._readers


class LossDefinitions(Protocol):
    """The definitions that clients registered for one `loss_fn`, each in its session."""

    async def definition(self, loss_id: str, *, session_id: str) -> bytes:
        """Return what the trainer needs besides the request. Raises `UnknownLoss`."""

    async def recall(self, request_id: str) -> Outcome | None:
        """Return the result of the request that registered a definition, or None."""

    async def end_session(self, session_id: str) -> None:
        """Delete the session's definitions."""


Body = (
    OptimStep
    | LossReference
    | SaveWeights
    | SaveWeightsForSampler
    | SaveWeightsExternal
    | LoadWeights
)


@dataclass(frozen=True)
class Operation:
    """One entry of a run's log, while it has not ended.

    `payload` or `blob` has the protobuf of a forward_backward: small ones stay in memory,
    others are read again when their turn comes. `refused`: it only takes its place in the log.
    `size`: bytes of its payload. `turn`: held while it is read, since owners take turns in that.
    """

    run_id: str
    seq_id: int
    kind: Kind
    future: Future
    body: Body | None = None
    payload: bytes | None = None
    blob: Path | None = None
    refused: TandemError | None = None
    size: int = 0
    turn: Callable[[], AbstractAsyncContextManager[None]] = nullcontext
    accepted_at: float = field(default_factory=time.monotonic)

    @property
    def changes_gradients(self) -> bool:
        return self.kind == "forward_backward"

    @property
    def usage_kind(self) -> UsageKind:
        """What the operation is metered as. An unnamed save for a sampler is a publish, because
        it leaves no checkpoint."""
        match self.body:
            case SaveWeightsForSampler(path=None):
                return "publish"
            case LoadWeights():
                return "load_weights"
        assert self.kind != "create_model", "creating a model asks nothing of a trainer"
        return self.kind

    @property
    def alone(self) -> bool:
        """Named saves and loads look at what the saves before them left, so that these must
        have ended."""
        match self.body:
            case SaveWeights() | SaveWeightsExternal() | LoadWeights():
                return True
            case SaveWeightsForSampler():
                return self.body.path is not None
            case _:
                return False

    async def read_payload(self) -> bytes:
        if self.payload is not None:
            return self.payload
        assert self.blob is not None
        async with self.turn():
            return await asyncio.to_thread(self.blob.read_bytes)
