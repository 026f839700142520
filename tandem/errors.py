"""Every error that Tandem tells anybody about.

    TandemError
    ├── UserError (also a ValueError): the request was wrong; repeating it is useless
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
    │   │   └── CheckpointMismatch
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
    │   ├── SampleCancelled
    │   └── SequenceGap
    └── ServerError: the request was right; the platform failed it
        ├── WorkerStartFailed
        │   └── WorkerCrashed
        ├── WorkerDied
        ├── OperationTimedOut
        ├── GatewayRestarted
        ├── StorageFull
        ├── PublishFailed
        ├── LoadFailed
        ├── CheckpointDamaged
        ├── GradientsNotFinite
        ├── Overloaded              429
        ├── RequestTimedOut         408
        ├── IllegalTransition
        └── InternalError

An error crosses a process boundary as (type, message), where `type` is the snake-case name
of its class, and `from_failure` makes the class out of it again. The status is what HTTP
answers when a request is refused at once; an accepted operation that fails is answered with
200 and `{"error", "category"}` instead (the SDK repeats 409, 429 and 5xx for five minutes).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import ClassVar, Literal

from tandem.v1 import common_pb2

Category = Literal["user", "server"]

_LONGEST_MESSAGE = 4000
"""Characters."""


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


class TandemError(Exception):
    """Something that a client is told.

    Literal example: `UnknownLoss("unknown loss 'pppo'; known: cispo, cross_entropy")`
    has `type == "unknown_loss"`, `category == "user"` and `status == 400`.
    """

    category: ClassVar[Category] = "server"
    status: ClassVar[int] = 500
    type: ClassVar[str] = "tandem_error"

    def __init_subclass__(cls) -> None:
        if "type" in cls.__dict__:  # it carries more, and is told as the error that it names
            return
        cls.type = _snake(cls.__name__)
        _BY_TYPE[cls.type] = cls

    @property
    def message(self) -> str:
        """The sentence. Where it repeats what a client sent it is cut: no answer, log line or
        row grows with a name of megabytes."""
        text = str(self.args[0]) if self.args else self.type
        return text if len(text) <= _LONGEST_MESSAGE else f"{text[:_LONGEST_MESSAGE]}…"

    @property
    def details(self) -> Mapping[str, object]:
        """What a refusal says beside its sentence, for programs."""
        return {}

    def to_failure(self) -> common_pb2.Failure:
        return common_pb2.Failure(type=self.type, message=self.message)


_BY_TYPE: dict[str, type[TandemError]] = {}


def from_failure(failure: common_pb2.Failure) -> TandemError:
    """The error that a worker put into its reply. An unknown type becomes `InternalError`."""
    return _BY_TYPE.get(failure.type, InternalError)(failure.message)


def from_type(type_: str, message: str) -> TandemError:
    """The error of a stored (type, message) pair."""
    return _BY_TYPE.get(type_, InternalError)(message)


# --- The request was wrong ---------------------------------------------------------------


class UserError(TandemError, ValueError):
    category: ClassVar[Category] = "user"
    status: ClassVar[int] = 400


class Unauthenticated(UserError):
    status = 401


class TokenRefused(Unauthenticated):
    """A token that has expired or was not signed here; the SDK gets itself a new one."""


class PermissionDenied(UserError):
    """The key is good, and does not allow this."""

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
    """An API key that is to be revoked, by its id."""

    status = 404


class AddressForged(UserError):
    """A download address that was not signed here, or was altered since."""

    status = 403


class AddressExpired(UserError):
    """A download address whose time is over."""

    status = 410


class SessionFinished(UserError):
    status = 410


class PayloadTooLarge(UserError):
    status = 413


class LimitExceeded(UserError):
    """An owner has as much of something as is allowed, and waiting will not mend it.

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
        if not self.limit:  # one that was read back from the log has its sentence alone
            return {}
        return {"limit": self.limit, "limit_value": self.value, "used": self.used}


class InvalidRequest(UserError):
    """A field is missing, of the wrong type or out of its range."""


class MalformedPayload(InvalidRequest):
    """The body is not what its content type says."""


class SdkTooOld(InvalidRequest):
    """The client speaks a protocol that is gone, and has to be upgraded."""


class UnsupportedInput(InvalidRequest):
    """A well-formed input of a kind that this server does not take, such as an image."""


class StructuredOutputInvalid(InvalidRequest):
    """A form for samples (regex, JSON schema, choice) that is wrong, too large, or that the
    model's tokens cannot follow."""


class UnsuitableLora(InvalidRequest):
    """A LoRA configuration that the model cannot have: its rank, or the layers named."""


class CheckpointMismatch(InvalidRequest):
    """A checkpoint of another model, or of a run that trains something else."""


class CustomLossInvalid(InvalidRequest):
    """A traced loss that uses what the allow-list of operations does not have."""


class EmptyBatch(UserError):
    """No datum, or a datum without a token."""


class TokenOutOfVocabulary(UserError):
    pass


class SequenceTooLong(UserError):
    pass


class LossInputMissing(UserError):
    pass


class LossInputShape(UserError):
    pass


class LossInputNotFinite(UserError):
    pass


class UnknownLoss(UserError):
    pass


class UnknownLossSetting(UserError):
    pass


class CustomLossFailed(UserError):
    """A custom loss that could not be computed on the datums it was given."""


class OptimizerSetting(UserError):
    pass


class NoGradients(UserError):
    """optim_step without a forward_backward before it."""


class GradientsIncomplete(UserError):
    """optim_step after a forward_backward that was refused."""


class NameTaken(UserError):
    """A checkpoint or model of this name exists. (Not 409: the SDK would repeat that.)"""


class SampleCancelled(UserError):
    """A sample that its client has given up."""


class SequenceGap(UserError):
    """An operation waited too long for one with a smaller seq_id, which never came."""


# --- The platform failed it --------------------------------------------------------------


class ServerError(TandemError):
    category: ClassVar[Category] = "server"


class WorkerStartFailed(ServerError):
    pass


class WorkerCrashed(WorkerStartFailed):
    """It started, and a fault in native code ended it before it was ready."""


class WorkerDied(ServerError):
    pass


class OperationTimedOut(ServerError):
    pass


class GatewayRestarted(ServerError):
    pass


class StorageFull(ServerError):
    pass


class PublishFailed(ServerError):
    pass


class LoadFailed(ServerError):
    """A version could not be put into an engine; what served before goes on serving."""


class CheckpointDamaged(ServerError):
    pass


class GradientsNotFinite(ServerError):
    pass


class Overloaded(ServerError):
    """There is no room now, and there will be: `retry_after` in seconds, `position` the place
    in the queue that the request would have had (0: it is not about a queue)."""

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
        more: dict[str, object] = {"retry_after_seconds": self.retry_after}
        if self.limit:
            more["limit"] = self.limit
        if self.position:
            more["queue_position"] = self.position
        return more


class RequestTimedOut(ServerError):
    """A request whose body did not arrive in time. It may be sent again, which the SDK does
    by itself."""

    status = 408


class IllegalTransition(ServerError):
    pass


class InternalError(ServerError):
    pass
