"""Operations: their kinds and bodies, and `Call`, an operation at its turn."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Literal, cast

import orjson
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr

from gateway.identifiers import (
    CheckpointPath,
    check_name,
    check_ttl,
    new_state_folder,
    parse_checkpoint_path,
    relative_version_folder,
)
from gateway.owners.auth.identity import Caller, Readers
from gateway.owners.sessions.registry import TextMetadata
from gateway.owners.usage.meter import UsageKind
from gateway.storage.futures.table import Future, Result
from tandem.errors import InvalidRequest, TandemError
from tandem.weights import new_version_name

TRAINER_AT_WORK = "the trainer is at work on it"

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


STATE_CHANGES: frozenset[Kind] = frozenset({"forward_backward", "optim_step", "load_weights"})
"""Operations that change the trainer's state, so that a replay needs them."""
RowInteger = Annotated[int, Field(ge=-(2**53), le=2**53)]
"""The integers that fit into a row. Their meaning is checked at the operation's turn."""


class AdamParams(BaseModel):
    """The SDK's defaults. The SDK always sends all fields."""

    model_config = ConfigDict(allow_inf_nan=False)

    learning_rate: float = Field(1e-4, ge=0)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    eps: float = Field(1e-12, ge=0)
    weight_decay: float = Field(0.0, ge=0)
    grad_clip_norm: float = Field(0.0, ge=0)


class DimuonParams(BaseModel):
    """The SDK's fields. A `grad_clip_norm` of 0 or less turns clipping off."""

    model_config = ConfigDict(allow_inf_nan=False, extra="forbid")

    type: Literal["dimuon"] = "dimuon"
    learning_rate: float = Field(ge=0)
    grad_clip_norm: float = 0.0
    beta1: float = Field(0.9, ge=0, lt=1)


class OptimStep(BaseModel):
    params: AdamParams | DimuonParams


class LossReference(BaseModel):
    """A forward_backward's loss, registered beforehand under an id."""

    loss_fn: str
    loss_id: str


class SaveWeights(BaseModel):
    path: str
    ttl_seconds: RowInteger | None = None
    overwrite: bool = False
    user_metadata: TextMetadata | None = None


class SaveWeightsForSampler(BaseModel):
    """Named by `path`, or ephemeral by `sampling_session_seq_id`."""

    path: str | None = None
    sampling_session_seq_id: int | None = Field(None, ge=0, le=2**53)
    kind: Literal["snapshot", "inflight"] = "snapshot"
    ttl_seconds: RowInteger | None = None
    user_metadata: TextMetadata | None = None


class SaveWeightsExternal(BaseModel):
    """Every file is encrypted to each of `age_encryption_recipients`."""

    path: str
    ttl_seconds: RowInteger | None = None
    age_encryption_recipients: list[str] | None = None


class LoadWeights(BaseModel):
    path: str
    optimizer: bool = False
    _readers: Readers | None = PrivateAttr(None)

    def on_behalf_of(self, readers: Readers) -> LoadWeights:
        """Remember the caller's rights for the lookup at the operation's turn."""
        self._readers = readers
        return self

    @property
    def readers(self) -> Readers:
        assert self._readers is not None, "a load without readers"
        return self._readers


Body = (
    OptimStep
    | LossReference
    | SaveWeights
    | SaveWeightsForSampler
    | SaveWeightsExternal
    | LoadWeights
)


_BODIES: Mapping[Kind, type[BaseModel]] = {
    "forward": LossReference,
    "forward_backward": LossReference,
    "optim_step": OptimStep,
    "save_weights": SaveWeights,
    "save_weights_for_sampler": SaveWeightsForSampler,
    "save_weights_external": SaveWeightsExternal,
    "load_weights": LoadWeights,
}


def body_to_json(body: Body | None) -> bytes:
    """Return JSON for `body_from_json`, empty for None."""
    if body is None:
        return b""
    fields = body.model_dump(mode="json")
    if isinstance(body, LoadWeights):
        fields["readers"] = [asdict(caller) for caller in body.readers.callers]
    return orjson.dumps(fields)


def body_from_json(kind: Kind, content: bytes) -> Body | None:
    if not content:
        return None
    fields = orjson.loads(content)
    readers = Readers(tuple(Caller(**caller) for caller in fields.pop("readers", ())))
    body = cast(Body, _BODIES[kind].model_validate(fields))
    return body.on_behalf_of(readers) if isinstance(body, LoadWeights) else body


@dataclass(frozen=True)
class Operation:
    """An accepted, unfinished operation.

    `has_payload`: the journal has the protobuf of a forward_backward, and `payload` a copy if there
    was room. `size` is the request's bytes. A `refused` operation fails at its turn. A `resumed`
    one was accepted, and perhaps carried out, by an earlier gateway."""

    run_id: str
    seq_id: int
    kind: Kind
    future: Future
    body: Body | None = None
    payload: bytes | None = None
    has_payload: bool = False
    size: int = 0
    digest: bytes = b""
    refused: TandemError | None = None
    resumed: bool = False

    @property
    def usage_kind(self) -> UsageKind:
        """The kind for metering. An unnamed save is a publish, because it leaves no checkpoint."""
        if isinstance(self.body, SaveWeightsForSampler) and self.body.path is None:
            return "publish"
        assert self.kind != "create_model", "creating a model asks nothing of a trainer"
        return self.kind

    @property
    def folder(self) -> str:
        """The trainer's output folder in the data directory, or "". A repeated operation finds its
        earlier output there."""
        if isinstance(self.body, SaveWeights):
            suffix = f"{self.seq_id:08x}"
            return new_state_folder(run_id=self.run_id, name=self.body.path, suffix=suffix)
        if isinstance(self.body, SaveWeightsForSampler | SaveWeightsExternal):
            return relative_version_folder(self.version)
        return ""

    @property
    def version(self) -> str:
        suffix = self.digest.hex()[:8]
        return new_version_name(run_id=self.run_id, number=self.seq_id, suffix=suffix)

    @property
    def changes_state(self) -> bool:
        return self.kind in STATE_CHANGES

    @property
    def checkpoint(self) -> CheckpointPath | None:
        """The path of a named save."""
        match self.body:
            case SaveWeights(path=name):
                return CheckpointPath(run_id=self.run_id, kind="weights", name=name)
            case SaveWeightsForSampler(path=str(name)):
                return CheckpointPath(run_id=self.run_id, kind="sampler_weights", name=name)
            case SaveWeightsExternal(path=name):
                return CheckpointPath(run_id=self.run_id, kind="external_weights", name=name)
        return None

    @property
    def is_exclusive(self) -> bool:
        """Whether earlier operations must have ended. Named saves and loads look at their
        checkpoints."""
        return isinstance(self.body, LoadWeights) or self.checkpoint is not None


@dataclass(frozen=True)
class Progress:
    """A trainer's progress on an operation. `seconds` counts from its turn. `tokens_done` of
    `tokens` are computed; both are 0 without a batch. `compiling`: the computation is not compiled
    yet."""

    seconds: float
    tokens_done: int = 0
    tokens: int = 0
    compiling: bool = False

    @property
    def tokens_per_second(self) -> float:
        return self.tokens_done / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        """Examples: `4,096 of 65,536 tokens, 512 tokens/s, 8 s`; `compiling, 20 s`."""
        if self.compiling:
            return f"compiling, {self.seconds:.0f} s"
        if not self.tokens:
            return f"{self.seconds:.0f} s"
        return (
            f"{self.tokens_done:,} of {self.tokens:,} tokens, {self.tokens_per_second:,.0f} "
            f"tokens/s, {self.seconds:.0f} s"
        )


@dataclass(eq=False)
class Call:
    """An operation at its turn. `waiting_for`, or `explain()`, is the client's reason for waiting.
    `is_paused()`: nothing moves until something has started.
    `progress` is the trainer's last report. `wake` is set when the next operation may go.
    `gradients_incomplete` reports a refused forward_backward. `begun` is done when earlier calls
    are answered. `failed`: the trainer answered with a failure. `gone` is done when the answering
    trainer has ended."""

    operation: Operation
    previous_seq_id: int = -1
    gradients_incomplete: str = ""
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    sent: bool = False
    answered: bool = False
    failed: bool = False
    released: bool = False
    waiting_for: str = "it is being prepared"
    explain: Callable[[], str] | None = None
    is_paused: Callable[[], bool] = lambda: False
    progress: Progress | None = None
    begun: asyncio.Future[None] = field(default_factory=asyncio.Future)
    gone: asyncio.Future[None] = field(default_factory=asyncio.Future)

    def describe(self) -> str:
        """Example: `forward_backward 12: the trainer is at work on it (4,096 of 65,536
        tokens, 512 tokens/s, 8 s)`."""
        why = self.explain() if self.explain is not None else self.waiting_for
        age = Progress(time.monotonic() - self.operation.future.accepted_at)
        progress = self.progress if why == TRAINER_AT_WORK and self.progress is not None else age
        return f"{self.operation.kind} {self.operation.seq_id}: {why} ({progress})"

    def begin(self) -> None:
        if not self.begun.done():
            self.begun.set_result(None)

    def send(self) -> None:
        self.sent = True
        self.waiting_for = TRAINER_AT_WORK
        self.wake.set()

    def release(self) -> None:
        """Free the window's slot, because the rest (a sampler's load, an encryption) needs no
        trainer."""
        self.released = True
        self.wake.set()


class RunBroken(Exception):
    """The trainer is gone or its state is unknown. `error` ends the run."""

    def __init__(self, error: TandemError) -> None:
        super().__init__(error.message)
        self.error = error


def check_body(body: Body) -> None:
    """Check a body before the operation's turn. Raises `InvalidRequest`."""
    match body:
        case LoadWeights():
            parse_checkpoint_path(body.path)
        case (
            SaveWeights(path=str(name))
            | SaveWeightsForSampler(path=str(name))
            | (SaveWeightsExternal(path=str(name)))
        ):
            check_name(name)
            check_ttl(body.ttl_seconds)
        case SaveWeightsForSampler(sampling_session_seq_id=None):
            raise InvalidRequest(
                "save_weights_for_sampler needs a path or a sampling_session_seq_id"
            )


def json_result(**fields: object) -> Result:
    return Result(media="json", body=orjson.dumps(fields))
