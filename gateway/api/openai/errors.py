"""Errors as OpenAI's clients know them: `{"error": {"message", "type", "param", "code"}}`.

Imports nothing of the gateway, since everything that answers may need it.
"""

from __future__ import annotations

import math

import orjson
from starlette.responses import Response

from tandem.errors import (
    GatewayRestarted,
    InvalidRequest,
    OperationTimedOut,
    Overloaded,
    SequenceTooLong,
    SessionFinished,
    TandemError,
    Unauthenticated,
    UnknownModel,
    UnknownRun,
    UnknownWeights,
    UserError,
    WorkerDied,
    WorkerStartFailed,
)

PREFIX = "/v1/"

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
}
"""`type` by status; 4xx else is an invalid_request_error, 5xx a server_error."""

_CODES: dict[type[TandemError], str] = {
    Unauthenticated: "invalid_api_key",
    UnknownModel: "model_not_found",
    UnknownWeights: "model_not_found",
    UnknownRun: "model_not_found",
    SequenceTooLong: "context_length_exceeded",
    Overloaded: "rate_limit_exceeded",
}
"""Where clients know a code of their own; else it is the type of our error."""

_RETRY_SOON = 5.0
"""Seconds after which a client should ask a server that is starting something again."""


class FieldRefused(InvalidRequest):
    """A field of the request that is wrong, or that this server does not do: its name."""

    type = InvalidRequest.type

    def __init__(self, message: str, *, param: str) -> None:
        super().__init__(message)
        self.param = param


class NotReady(WorkerStartFailed):
    """The engine is still starting; it goes on starting, so that asking again helps."""

    type = "engine_starting"


def status_of(error: TandemError) -> int:
    """Literal examples: 404 for `UnknownModel`, 503 for `WorkerStartFailed`, 504 for
    `OperationTimedOut`."""
    if isinstance(error, SessionFinished | WorkerStartFailed | WorkerDied | GatewayRestarted):
        return 503  # of ours, not the client's: the next request gets a new session and engine
    if isinstance(error, OperationTimedOut):
        return 504
    return error.status if isinstance(error, UserError | Overloaded) else 500


def error_content(error: TandemError) -> dict[str, object]:
    """Literal example: `{"error": {"message": "unknown model 'x'; …", "type":
    "not_found_error", "param": "model", "code": "model_not_found"}}`."""
    code = next((code for kind, code in _CODES.items() if isinstance(error, kind)), error.type)
    return content_of(
        error.message,
        status=status_of(error),
        param=_param_of(error),
        code=code,
        **error.details,
    )


def content_of(
    message: str, *, status: int, param: str | None, code: str, **more: object
) -> dict[str, object]:
    kind = _KINDS.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code, **more}}


def openai_error(error: TandemError) -> Response:
    """A request that was refused or failed, with `Retry-After` where asking again helps."""
    status = status_of(error)
    response = Response(
        orjson.dumps(error_content(error)), status_code=status, media_type="application/json"
    )
    if isinstance(error, Overloaded):
        response.headers["Retry-After"] = str(max(1, math.ceil(error.retry_after)))
    elif status == 408:  # what still comes of the request is of no use
        response.headers["Connection"] = "close"
    elif status in (503, 504):
        response.headers["Retry-After"] = str(math.ceil(_RETRY_SOON))
    return response


def openai_http_error(message: str, *, status: int) -> Response:
    """What the router refuses: an unknown path, or another method."""
    content = content_of(message, status=status, param=None, code="unknown_endpoint")
    return Response(orjson.dumps(content), status_code=status, media_type="application/json")


def _param_of(error: TandemError) -> str | None:
    if isinstance(error, FieldRefused):
        return error.param
    return "model" if isinstance(error, UnknownModel | UnknownWeights | UnknownRun) else None
