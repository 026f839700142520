"""The errors that Tandem reports to clients and between its processes.

    TandemError
    ├── UserError (also a ValueError): the request is wrong, and fails again if repeated
    │   ├── Unauthenticated         401
    │   │   └── TokenRefused        401
    │   ├── PermissionDenied        403
    │   ├── UnknownModel            404
    │   ├── UnknownSession          404
    │   ├── UnknownRun              404
    │   ├── UnknownSampler          404
    │   ├── UnknownWeights          404
    │   ├── UnknownRequest          404
    │   ├── UnknownKey              404
    │   ├── UnknownGroup            404
    │   ├── AddressForged           403
    │   ├── AddressExpired          410
    │   ├── SessionFinished         410
    │   ├── PayloadTooLarge         413
    │   ├── LimitExceeded           403
    │   ├── InvalidRequest          400
    │   │   ├── MalformedPayload
    │   │   ├── UnsupportedInput
    │   │   ├── SdkTooOld
    │   │   ├── CustomLossInvalid
    │   │   ├── StructuredOutputInvalid
    │   │   ├── UnsuitableLora
    │   │   ├── UnsupportedByBackend
    │   │   └── CheckpointMismatch
    │   ├── UnknownSchema
    │   ├── UnknownSetting
    │   ├── EmptyBatch
    │   ├── TokenOutOfVocabulary
    │   ├── SequenceTooLong
    │   ├── LossInputMissing
    │   ├── LossInputShape
    │   ├── LossInputNotFinite
    │   ├── UnknownLoss
    │   ├── UnknownLossSetting
    │   ├── CustomLossFailed
    │   ├── OptimizerSetting
    │   ├── NoGradients
    │   ├── GradientsIncomplete
    │   ├── NameTaken
    │   ├── NoRoom
    │   ├── SampleCancelled
    │   ├── SequenceGap
    │   └── SequenceTaken
    └── ServerError: the request is valid, but was not carried out
        ├── WorkerStartFailed
        │   └── WorkerCrashed
        ├── WorkerDied
        ├── WorkerMayRun
        ├── OperationTimedOut
        ├── OutOfMemory
        ├── GatewayRestarted
        ├── GatewaySuperseded       503
        ├── StandingBy              503
        ├── StorageFailed           503
        │   └── StorageFull         507
        ├── PublishFailed
        ├── LoadFailed
        ├── CheckpointDamaged
        ├── GradientsNotFinite
        ├── Overloaded              429
        ├── RequestTimedOut         408
        ├── IllegalTransition
        ├── CannotSleep
        ├── SuspendFailed
        └── InternalError

An error crosses a process boundary as (type, message), where `type` is the snake-case name of
its class; `from_failure` turns the pair back into the class. The status (400 or 500 where the
tree gives none) is the HTTP answer to a request that is refused at once. An accepted operation
that fails is answered with 200 and `{"error", "category"}` instead, since the SDK retries 409,
429 and 5xx for five minutes.
"""

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
"""Also escaped, as in JSON, and percent-encoded, as in an address, once or more often."""
_ROOTS = (
    r"\bfile:(?://[^\s/'\"`]{0,255})?/+",  # file:///srv, file://localhost/srv
    r"(?<=://)/+",  # https:///srv
    r"(?<=[^\s:/]/)/+",  # https://example.org//srv
    r"(?<![\w.~/\\%:-])(?:~[\w.-]*)?/+",  # /srv, //srv, ~/srv, ~ann/srv
    r"(?<=:)(?:~[\w.-]*)?\\{0,8}/(?!/)",  # of a scheme's name a double slash follows
    r"(?<![\w.-])%(?:25){0,8}2[Ff]",
    r"(?<=\\[nrt])/",  # a line of a text that is quoted
    r"(?<![\w.~/\\%-])\\{1,8}/",
)
_FOLDERS = re.compile(
    rf"(?:{'|'.join(_ROOTS)})"
    # Names of up to three words; in quotes of any number. Each matches in one way only (`?>`,
    # `++`): a text with many ways would stop its reader for years.
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

    Literal example: `UnknownLoss("unknown loss 'pppo'; known: cispo, cross_entropy")`
    has `type == "unknown_loss"`, `category == "user"` and `status == 400`.
    """

    category: ClassVar[Category] = "server"
    status: ClassVar[int] = 500
    type: ClassVar[str] = "tandem_error"
    retry_after: float | None = None
    """Seconds after which the same request may succeed; None where waiting does not help."""

    def __init_subclass__(cls) -> None:
        if "type" in cls.__dict__:  # a richer form of the error that it names, reported as that
            return
        cls.type = _snake(cls.__name__)
        _BY_TYPE[cls.type] = cls

    @property
    def message(self) -> str:
        """The sentence, truncated: it may quote what a client sent, which may be megabytes."""
        text = (str(self.args[0]) if self.args else "") or self.type
        return text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]}…"

    @property
    def details(self) -> Mapping[str, object]:
        """Further fields of an HTTP answer, for programs."""
        return {} if self.retry_after is None else {"retry_after_seconds": self.retry_after}

    def to_failure(self) -> common_pb2.Failure:
        """Return the form in which a worker puts the error into its reply."""
        return common_pb2.Failure(type=self.type, message=self.message)


_BY_TYPE: dict[str, type[TandemError]] = {}
"""Every error class by its type, filled as the classes below are made."""


def from_failure(failure: common_pb2.Failure) -> TandemError:
    """Return the error that a worker put into its reply. A fault of the platform names no paths of
    the machine; a user's mistake may quote what the user sent."""
    error = from_type(failure.type, failure.message)
    if error.category == "user":
        return error
    return type(error)(without_paths(failure.message))


def from_type(type_: str, message: str) -> TandemError:
    """Return the error of a (type, message) pair; an unknown type becomes `InternalError`."""
    return _BY_TYPE.get(type_, InternalError)(message)


def unusable_directory(data_dir: Path, error: OSError) -> InvalidRequest:
    """Return the error for a data directory in which something could not be made or opened."""
    in_the_way = isinstance(error, FileExistsError | NotADirectoryError)
    reason = "there is a file in the place of a directory" if in_the_way else error.strerror
    return InvalidRequest(
        f"the data directory {data_dir} cannot be used: {error.filename or data_dir}: "
        f"{reason or error}; choose another with --data-dir (TANDEM_DATA_DIR)"
    )


def without_paths(text: str) -> str:
    """Return the sentence of a library, a worker or the system with absolute paths cut to their
    last part, for clients, whom the folders of this machine do not concern. A path may be in an
    address: libraries take the folder of a model for its name on a hub.

    Literal example: `[Errno 13] Permission denied: '/srv/data/x'` ends in `'x'`.
    """
    return _FOLDERS.sub("", _QUOTED.sub("", text))


def describe(error: BaseException, *, typed: bool = False) -> str:
    """Return the sentence of an error of any library, for people. An error without a sentence is
    shown by its type and its cause. `typed` puts the type before a sentence, too. A cancellation is
    no cause: a timeout cancels what it ends.

    Literal example: `AssertionError()` raised from `KeyError("rank")` gives
    `AssertionError, caused by KeyError: 'rank'`.
    """
    name = type(error).__name__
    text = error.message if isinstance(error, TandemError) else str(error).strip()
    if text:
        bare = isinstance(error, KeyError)  # its text is the key alone
        return f"{name}: {text}" if typed or bare else text
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if cause is None or isinstance(cause, asyncio.CancelledError):
        return name
    return f"{name}, caused by {describe(cause, typed=True)}"


# --- The request is wrong ----------------------------------------------------------------


class UserError(TandemError, ValueError):
    """The request is wrong, and fails again if repeated."""

    category: ClassVar[Category] = "user"
    status: ClassVar[int] = 400


class Unauthenticated(UserError):
    """The request carries no valid key or token."""

    status = 401


class TokenRefused(Unauthenticated):
    """A token that has expired or was not signed here; the SDK then requests a new one."""


class PermissionDenied(UserError):
    """The key is valid but does not allow the request."""

    status = 403


class UnknownModel(UserError):
    """There is no base model of this name."""

    status = 404


class UnknownSession(UserError):
    """There is no session of this id that the caller may see."""

    status = 404


class UnknownRun(UserError):
    """There is no training run of this id that the caller may see."""

    status = 404


class UnknownSampler(UserError):
    """There is no sampling session of this id that the caller may see."""

    status = 404


class UnknownWeights(UserError):
    """There is no checkpoint of this path that the caller may see."""

    status = 404


class UnknownRequest(UserError):
    """There is no request of this id that the caller may see."""

    status = 404


class UnknownKey(UserError):
    """There is no API key of this id."""

    status = 404


class UnknownGroup(UserError):
    """There is no device group of this name."""

    status = 404


class AddressForged(UserError):
    """A download address that was not signed here, or was altered."""

    status = 403


class AddressExpired(UserError):
    """A download address that has expired."""

    status = 410


class SessionFinished(UserError):
    """The session or the training run has ended."""

    status = 410


class PayloadTooLarge(UserError):
    """The body, decompressed, has more bytes than allowed."""

    status = 413


class LimitExceeded(UserError):
    """An owner has reached a limit, and waiting does not help.

    Literal example: `limit="runs", value=64, used=64`. Sizes in bytes.
    """

    status = 403

    def __init__(self, message: str, *, limit: str = "", value: int = 0, used: int = 0) -> None:
        super().__init__(message)
        self.limit = limit
        self.value = value
        self.used = used

    @property
    def details(self) -> Mapping[str, object]:
        if not self.limit:  # read back from the journal, which keeps the sentence alone
            return {}
        return {"limit": self.limit, "limit_value": self.value, "used": self.used}


class InvalidRequest(UserError):
    """A field is missing, of the wrong type or out of its range."""


class MalformedPayload(InvalidRequest):
    """The body is not what its content type says."""


class SdkTooOld(InvalidRequest):
    """The client speaks a protocol that is no longer served, and has to be upgraded."""


class UnsupportedInput(InvalidRequest):
    """A well-formed input of a kind that this server does not support, such as an image."""


class StructuredOutputInvalid(InvalidRequest):
    """A regex, JSON schema or choice for samples that is invalid, too large, or that the model's
    tokens cannot express."""


class UnsuitableLora(InvalidRequest):
    """A LoRA configuration whose rank or layers the model does not support."""


class UnsupportedByBackend(InvalidRequest):
    """The run's trainer backend cannot do what is asked of it."""


class CheckpointMismatch(InvalidRequest):
    """A checkpoint of another model, or of a run that trains something else."""


class CustomLossInvalid(InvalidRequest):
    """A traced loss that is malformed or uses an operation that is not allowed."""


class UnknownSchema(UserError):
    """The database has a schema that this release cannot migrate."""


class UnknownSetting(UserError):
    """An environment variable that begins with TANDEM_ has no known name. A process that meets one
    ends with status 2."""


class EmptyBatch(UserError):
    """No datum, or a datum without a token."""


class TokenOutOfVocabulary(UserError):
    """A token id that the model's vocabulary does not have."""


class SequenceTooLong(UserError):
    """A sequence longer than the model's maximum."""


class LossInputMissing(UserError):
    """A datum lacks an input of the loss."""


class LossInputShape(UserError):
    """An input of the loss has the wrong shape or type."""


class LossInputNotFinite(UserError):
    """An input of the loss holds NaN or infinity."""


class UnknownLoss(UserError):
    """There is no loss of this name."""


class UnknownLossSetting(UserError):
    """The loss has no setting of this name, or not this value."""


class CustomLossFailed(UserError):
    """A custom loss could not be computed on the datums that it was given."""


class OptimizerSetting(UserError):
    """A setting of the optimizer is out of its range."""


class NoGradients(UserError):
    """optim_step without a forward_backward before it."""


class GradientsIncomplete(UserError):
    """optim_step after a forward_backward that failed."""


class NameTaken(UserError):
    """A checkpoint or model of this name exists. (Not 409: the SDK would retry.)"""


class NoRoom(UserError):
    """The device groups have no room for what is asked for now. (Not 409: the SDK would retry.)"""


class SampleCancelled(UserError):
    """The client has cancelled the sample."""


class SequenceGap(UserError):
    """An operation waited too long for one with a smaller seq_id."""


class SequenceTaken(UserError):
    """The run or the sampling session has another request with this seq_id. (Not 409: the SDK
    would retry.)"""


# --- The request is valid, but was not carried out ---------------------------------------


class ServerError(TandemError):
    """The request is valid, but was not carried out."""

    category: ClassVar[Category] = "server"


class WorkerStartFailed(ServerError):
    """A worker, or the gateway itself, could not be started."""


class WorkerCrashed(WorkerStartFailed):
    """A fault in native code ended a worker before it was ready."""


class WorkerDied(ServerError):
    """The worker that carried out the request has ended. `defect`: by an error in a program, which
    comes again when the request is repeated."""

    def __init__(self, message: str, *, defect: bool = False) -> None:
        super().__init__(message)
        self.defect = defect


class WorkerMayRun(ServerError):
    """It is not known whether a worker is gone: whoever could say so does not answer, or says that
    something of it is left."""


class OperationTimedOut(ServerError):
    """A worker did not answer in time."""


class OutOfMemory(ServerError):
    """A batch needs more memory than a trainer has. `tokens` of a micro-batch were too many."""

    def __init__(self, message: str, *, tokens: int = 0) -> None:
        super().__init__(message)
        self.tokens = tokens


class GatewayRestarted(ServerError):
    """A restart or the shutdown of the gateway ended the request."""


class GatewaySuperseded(ServerError):
    """Another gateway has taken over from this one, whose calls workers refuse."""

    status = 503
    retry_after = 1.0


class StandingBy(ServerError):
    """Another gateway serves now; this one waits to take over."""

    status = 503
    retry_after = 1.0


class StorageFailed(ServerError):
    """The database or the disk refuses to be read or written, and nothing was changed."""

    status = 503
    retry_after = 5.0


class StorageFull(StorageFailed):
    """There is too little free disk space."""

    status = 507


class PublishFailed(ServerError):
    """A weight version could not be published."""


class LoadFailed(ServerError):
    """A weight version could not be loaded; the engine goes on serving the one before."""


class CheckpointDamaged(ServerError):
    """Files of a checkpoint are missing or do not match their checksums."""


class GradientsNotFinite(ServerError):
    """The gradients hold NaN or infinity; the step was not taken."""


class Overloaded(ServerError):
    """A queue or another limit is full for now.

    `retry_after` in seconds; `position` in the queue that the request would have had (0: no queue
    is involved).
    """

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
    """The body of a request did not arrive in time. The SDK sends such a request again."""

    status = 408


class IllegalTransition(ServerError):
    """A state machine was asked for a move that its state does not allow."""


class CannotSleep(ServerError):
    """A worker cannot move its state off its devices by itself: its host may be able to."""


class SuspendFailed(ServerError):
    """The host could not suspend a worker's processes, or not resume them."""


class InternalError(ServerError):
    """A defect: details are in the log of the gateway or the worker."""
