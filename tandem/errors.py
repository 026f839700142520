"""Errors that Tandem reports to clients and between its processes.

A `UserError` says that the request is wrong, and fails again if repeated. A `ServerError` says that
the request is valid, but was not carried out. docs/design/errors.md lists all of them.

An error crosses a process boundary as (type, message). `type` is the snake-case name of its class,
and `from_failure` finds the class again. The status is the HTTP answer to a request that is refused
at once, by default 400 or 500. A failed operation that was accepted gets 200 and `{"error",
"category"}`, because the SDK repeats 409, 429 and 5xx for five minutes.

To add an error, add its class here and its example to `scripts/error_table.py`."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Literal

from tandem.v1 import common_pb2

Category = Literal["user", "server"]

_MAX_CHARACTERS = 4000
_SLASH = r"(?:\\{0,8}/|%(?:25){0,8}2[Ff])"
"""A slash, also escaped as in JSON or percent-encoded as in an address, once or several times."""
_ROOTS = (
    r"\bfile:(?://[^\s/'\"`]{0,255})?/+",  # file:///srv, file://localhost/srv
    r"(?<=://)/+",  # https:///srv
    r"(?<=[^\s:/]/)/+",  # https://example.org//srv
    r"(?<![\w.~/\\%:-])(?:~[\w.-]*)?/+",  # /srv, //srv, ~/srv, ~ann/srv
    r"(?<=:)(?:~[\w.-]*)?\\{0,8}/(?!/)",  # a scheme's name is followed by two slashes
    r"(?<![\w.-])%(?:25){0,8}2[Ff]",
    r"(?<=\\[nrt])/",  # a line of a quoted text
    r"(?<![\w.~/\\%-])\\{1,8}/",
)
_FOLDERS = re.compile(
    rf"(?:{'|'.join(_ROOTS)})"
    # Names of up to three words, or of any number in quotes. Each matches in one way only (`?>`,
    # `++`): a text with many ways would block its reader for years.
    rf"(?>[^\s/'\"`<>]{{1,255}}?(?: [\w.()+-]{{1,64}}){{0,2}}{_SLASH}++"
    r"(?![\s'\"`)\],;:]|$))++"
)
_QUOTED = re.compile(
    rf"""(?<=(['"`]))(?=[^'"`\n]+\1)(?:~[\w.-]*)?{_SLASH}[^'"`\n]*{_SLASH}(?=[^'"`\n])"""
)


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


class TandemError(Exception):
    """An error that is reported to a client.

    Example: `UnknownLoss("unknown loss 'pppo'; known: cispo, cross_entropy")` has `type ==
    "unknown_loss"`, `category == "user"` and `status == 400`."""

    category: ClassVar[Category] = "server"
    status: ClassVar[int] = 500
    type: ClassVar[str] = "tandem_error"
    retry_after: float | None = None
    """Seconds after which a repeated request may succeed, or None if waiting does not help."""

    def __init_subclass__(cls) -> None:
        if "type" in cls.__dict__:  # a subclass that is reported as its base
            return
        cls.type = _snake(cls.__name__)
        _BY_TYPE[cls.type] = cls

    @property
    def message(self) -> str:
        text = (str(self.args[0]) if self.args else "") or self.type
        return text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]}…"

    @property
    def details(self) -> Mapping[str, object]:
        """Further fields of an HTTP answer, for programs."""
        return {} if self.retry_after is None else {"retry_after_seconds": self.retry_after}

    def to_failure(self) -> common_pb2.Failure:
        return common_pb2.Failure(type=self.type, message=self.message)


_BY_TYPE: dict[str, type[TandemError]] = {}
"""Error classes by type, filled by `__init_subclass__`."""


def from_failure(failure: common_pb2.Failure) -> TandemError:
    """Return the error in a worker's reply. Server errors lose the machine's paths."""
    error = from_type(failure.type, failure.message)
    if error.category == "user":
        return error
    return type(error)(without_paths(failure.message))


def from_type(type_: str, message: str) -> TandemError:
    """An unknown type becomes `InternalError`."""
    return _BY_TYPE.get(type_, InternalError)(message)


def unusable_directory(data_dir: Path, error: OSError) -> InvalidRequest:
    """Return the error for a file that could not be made or opened in the data directory."""
    in_the_way = isinstance(error, FileExistsError | NotADirectoryError)
    reason = "there is a file in the place of a directory" if in_the_way else error.strerror
    return InvalidRequest(
        f"the data directory {data_dir} cannot be used: {error.filename or data_dir}: "
        f"{reason or error}; choose another with --data-dir (TANDEM_DATA_DIR)"
    )


def without_paths(text: str) -> str:
    """Cut absolute paths in a message to their last part, for clients.

    Paths in addresses are cut too: libraries take a model's folder for its name on a hub. Example:
    `[Errno 13] Permission denied: '/srv/data/x'` ends in `'x'`."""
    return _FOLDERS.sub("", _QUOTED.sub("", text))


def describe(error: BaseException, *, typed: bool = False) -> str:
    """Return the sentence of any library's error, for people.

    Without a sentence, or if `typed`, its type is shown, with its cause. A cancellation is no
    cause, because a timeout cancels its task. Example: `AssertionError()` raised from
    `KeyError("rank")` gives `AssertionError, caused by KeyError: 'rank'`."""
    name = type(error).__name__
    text = error.message if isinstance(error, TandemError) else str(error).strip()
    if text:
        bare = isinstance(error, KeyError)  # its text is only the key
        return f"{name}: {text}" if typed or bare else text
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if cause is None or isinstance(cause, asyncio.CancelledError):
        return name
    return f"{name}, caused by {describe(cause, typed=True)}"


# --- The request is wrong ----------------------------------------------------------------


class UserError(TandemError, ValueError):
    """The request is wrong, and fails again if repeated.

    An `Unknown…` error also stands for an object that the caller may not see."""

    category: ClassVar[Category] = "user"
    status: ClassVar[int] = 400


class Unauthenticated(UserError):
    """The request has no valid key or token."""

    status = 401


class TokenRefused(Unauthenticated):
    """The token has expired or was signed elsewhere. The SDK then requests a new one."""


class PermissionDenied(UserError):
    """The key is valid but does not allow the request."""

    status = 403


class UnknownModel(UserError):
    status = 404


class UnknownSession(UserError):
    status = 404


class UnknownRun(UserError):
    status = 404


class UnknownSampler(UserError):
    status = 404


class UnknownWeights(UserError):
    status = 404


class UnknownRequest(UserError):
    status = 404


class UnknownKey(UserError):
    status = 404


class UnknownTrace(UserError):
    status = 404


class UnknownTrial(UserError):
    status = 404


class TraceEnded(UserError):
    """The trace has expired or is full, so it takes no more turns."""

    status = 410


class UnknownGroup(UserError):
    status = 404


class UnknownOwner(UserError):
    status = 404


class AddressForged(UserError):
    """A download address that was altered or not signed here."""

    status = 403


class AddressExpired(UserError):
    """A download address that has expired."""

    status = 410


class SessionFinished(UserError):
    """The session or the training run has ended."""

    status = 410


class PayloadTooLarge(UserError):
    """The decompressed body has too many bytes."""

    status = 413


class LimitExceeded(UserError):
    """An owner has reached a limit, and waiting does not help.

    Example: `limit="runs", value=64, used=64`. Sizes are in bytes."""

    status = 403

    def __init__(self, message: str, *, limit: str = "", value: int = 0, used: int = 0) -> None:
        super().__init__(message)
        self.limit = limit
        self.value = value
        self.used = used

    @property
    def details(self) -> Mapping[str, object]:
        if not self.limit:  # read from the journal, which keeps only the sentence
            return {}
        return {"limit": self.limit, "limit_value": self.value, "used": self.used}


class InvalidRequest(UserError):
    """A field is missing, of the wrong type or out of its range."""


class InvalidField(InvalidRequest):
    """A setting is missing, unknown, of the wrong type or out of its range.

    `field` is its dotted path. Example: `field="learning_rate"`."""

    def __init__(self, message: str, *, field: str = "") -> None:
        super().__init__(message)
        self.field = field

    @property
    def details(self) -> Mapping[str, object]:
        return {"field": self.field}


class FrameworkMissing(InvalidRequest):
    """The job's framework is not installed where the job would run."""


class MalformedPayload(InvalidRequest):
    """The body does not match its content type."""


class SdkTooOld(InvalidRequest):
    """The client's protocol is no longer served."""


class UnsupportedInput(InvalidRequest):
    """A well-formed input of an unsupported kind, such as an image."""


class StructuredOutputInvalid(InvalidRequest):
    """A grammar that is invalid, too large, or impossible with the model's tokens."""


class UnsuitableLora(InvalidRequest):
    """A LoRA rank or choice of layers that the model does not support."""


class UnsupportedByBackend(InvalidRequest):
    """The run's trainer backend does not support the request."""


class CheckpointMismatch(InvalidRequest):
    """A checkpoint of another model, or of other trained parameters."""


class CustomLossInvalid(InvalidRequest):
    """A traced loss that is malformed or uses a forbidden operation."""


class UnknownSchema(UserError):
    """This release cannot migrate the database's schema."""


class UnknownSetting(UserError):
    """A TANDEM_ variable has an unknown name. Processes end with status 2."""


class EmptyBatch(UserError):
    """The batch has no datum, or a datum without tokens."""


class TokenOutOfVocabulary(UserError):
    """A token id is outside the model's vocabulary."""


class SequenceTooLong(UserError):
    """A sequence exceeds the model's maximum."""


class LossInputMissing(UserError):
    """A datum lacks an input of the loss."""


class LossInputShape(UserError):
    """A loss input has the wrong shape or type."""


class LossInputNotFinite(UserError):
    """A loss input holds NaN or infinity."""


class UnknownLoss(UserError):
    """No loss has this name."""


class UnknownLossSetting(UserError):
    """The loss has no setting of this name, or refuses its value."""


class CustomLossFailed(UserError):
    """A custom loss could not be computed on the given datums."""


class OptimizerSetting(UserError):
    """An optimizer setting is out of its range."""


class NoGradients(UserError):
    """optim_step without a forward_backward before it."""


class GradientsIncomplete(UserError):
    """optim_step after a forward_backward that failed."""


class NameTaken(UserError):
    """A checkpoint or model of this name exists. (Not 409: the SDK would repeat it.)"""


class NoRoom(UserError):
    """The device groups have no room now. (Not 409: the SDK would repeat it.)"""


class RunStopped(UserError):
    """Somebody has stopped the run."""


class BudgetExhausted(UserError):
    """The owner's budget is used up. (Not 402: the SDK would wait.)"""

    status = 403


class DeadlineExceeded(UserError):
    """The run has reached its `tandem.deadline`."""


PLANNED_ENDS: tuple[type[TandemError], ...] = (RunStopped, BudgetExhausted, DeadlineExceeded)
"""The errors of runs that ended by somebody's decision."""


class StaleVersion(UserError):
    """Weights or data are older than their bound. (Not 409: the SDK would repeat it.)"""

    status = 412


class SampleCancelled(UserError):
    """The client has cancelled the sample."""


class SequenceGap(UserError):
    """An operation waited too long for a smaller seq_id."""


class SequenceTaken(UserError):
    """Another request of the run or sampling session has this seq_id. (Not 409: the SDK would
    repeat it.)"""


# --- The request is valid, but was not carried out ---------------------------------------


class ServerError(TandemError):
    """The request is valid, but was not carried out."""

    category: ClassVar[Category] = "server"


class WorkerStartFailed(ServerError):
    """A worker or the gateway could not be started."""


class WorkerCrashed(WorkerStartFailed):
    """A fault in native code ended a worker before it was ready."""


class WorkerDied(ServerError):
    """The request's worker has ended. With `defect`, a program error ended it and will recur."""

    def __init__(self, message: str, *, defect: bool = False) -> None:
        super().__init__(message)
        self.defect = defect


class WorkerMayRun(ServerError):
    """A worker may still run: its host does not answer, or found a part of it."""


class OperationTimedOut(ServerError):
    """A worker did not answer in time."""


class OutOfMemory(ServerError):
    """A batch exceeds a trainer's memory. `tokens` is the size of the failed micro-batch."""

    def __init__(self, message: str, *, tokens: int = 0) -> None:
        super().__init__(message)
        self.tokens = tokens


class JobFailed(ServerError):
    """A job's last attempt ended without a result."""


class GatewayRestarted(ServerError):
    """A restart or the shutdown of the gateway ended the request."""


class GatewaySuperseded(ServerError):
    """Another gateway has replaced this one. Workers refuse its calls."""

    status = 503
    retry_after = 1.0


class StandingBy(ServerError):
    """Another gateway serves. This one waits to take over."""

    status = 503
    retry_after = 1.0


class SignInFailed(ServerError):
    """The OpenID Connect provider does not answer as it should. API keys go on working."""

    status = 503
    retry_after = 5.0


class StorageFailed(ServerError):
    """The database or disk cannot be read or written. Nothing was changed."""

    status = 503
    retry_after = 5.0


class StorageFull(StorageFailed):
    """There is too little free disk space."""

    status = 507


class PublishFailed(ServerError):
    """A weight version could not be published."""


class LoadFailed(ServerError):
    """A weight version could not be loaded. The engine serves the previous one."""


class CheckpointDamaged(ServerError):
    """Files of a checkpoint are missing or do not match their checksums."""


class GradientsNotFinite(ServerError):
    """The gradients hold NaN or infinity. The step was not taken."""


class Overloaded(ServerError):
    """A queue or another limit is full for now.

    `retry_after` is in seconds. `position` is the request's place in the queue, or 0 without a
    queue."""

    status = 429

    def __init__(
        self, message: str, *, limit: str = "", retry_after: float = 1.0, position: int = 0
    ) -> None:
        super().__init__(message)
        self.limit = limit
        self.retry_after = retry_after
        self.position = position

    @property
    def details(self) -> Mapping[str, object]:
        more = dict(super().details)
        if self.limit:
            more["limit"] = self.limit
        if self.position:
            more["queue_position"] = self.position
        return more


class RequestTimedOut(ServerError):
    """A request's body did not arrive in time. The SDK repeats the request."""

    status = 408


class IllegalTransition(ServerError):
    """A state machine's state does not allow the requested move."""


class CannotSleep(ServerError):
    """A worker cannot move its state off its devices. Its host may be able to."""


class SuspendFailed(ServerError):
    """The host could not suspend or resume a worker's processes."""


class InternalError(ServerError):
    """A defect. Details are in the log of the gateway or the worker."""
