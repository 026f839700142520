"""Errors in OpenAI's form: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

from starlette.responses import Response

from gateway.api.errors import InvalidField, json_response
from tandem.errors import (
    GatewayRestarted,
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

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
"""`type` by status; for other statuses, invalid_request_error (4xx) or server_error (5xx)."""

_CODES: dict[type[TandemError], str] = {
    Unauthenticated: "invalid_api_key",
    UnknownModel: "model_not_found",
    UnknownWeights: "model_not_found",
    UnknownRun: "model_not_found",
    SequenceTooLong: "context_length_exceeded",
    Overloaded: "rate_limit_exceeded",
}
"""The `code`s that OpenAI's clients know; for other errors it is our own error type."""

_RETRY_AFTER = 5
"""Seconds after which a client should retry while the server starts something."""


class EngineStarting(WorkerStartFailed):
    """The engine is still starting, and goes on starting, so that a retry helps."""

    type = "engine_starting"


def status_of(error: TandemError) -> int:
    """Return the HTTP status: 404 for `UnknownModel`, 503 for `WorkerStartFailed`, 504 for
    `OperationTimedOut`."""
    if isinstance(error, SessionFinished | WorkerStartFailed | WorkerDied | GatewayRestarted):
        return 503  # the server's doing: the next request gets a new session and engine
    if isinstance(error, OperationTimedOut):
        return 504
    return error.status if isinstance(error, UserError | Overloaded) else 500


def error_content(error: TandemError) -> dict[str, object]:
    """Return the body: `{"error": {"message": "unknown model 'x'; …", "type": "not_found_error",
    "param": "model", "code": "model_not_found"}}`."""
    code = next((code for kind, code in _CODES.items() if isinstance(error, kind)), error.type)
    param = "model" if isinstance(error, UnknownModel | UnknownWeights | UnknownRun) else None
    return _content(
        error.message,
        status=status_of(error),
        param=error.param if isinstance(error, InvalidField) else param,
        code=code,
        **error.details,
    )


def openai_refusal(error: TandemError) -> Response:
    """Write an error as OpenAI's clients know them (see `gateway.api.errors`)."""
    status = status_of(error)
    response = json_response(error_content(error), status=status)
    if status in (503, 504):
        response.headers["Retry-After"] = str(_RETRY_AFTER)
    return response


def _content(
    message: str, *, status: int, param: str | None, code: str, **details: object
) -> dict[str, object]:
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code, **details}}
