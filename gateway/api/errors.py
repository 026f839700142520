"""Turns exceptions into HTTP responses.

A dialect is the form of errors under a path prefix. The SDK's is the default. The application
registers others (`/v1/` for OpenAI's clients)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import orjson
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route

from gateway.api.request_body import JSON, fault
from tandem.errors import (
    InvalidRequest,
    RequestTimedOut,
    TandemError,
    TokenRefused,
    Unauthenticated,
    UserError,
)

Dialect = Callable[[TandemError], Response]

_AUTH = "/api/v1/auth/"


class InvalidParameter(InvalidRequest):
    """The field `param` of a request is wrong or not offered."""

    type = InvalidRequest.type

    def __init__(self, message: str, *, param: str) -> None:
        super().__init__(message)
        self.param = param


class UnknownEndpoint(UserError):
    """The path is unknown (404), or does not take the method (405)."""

    type = "unknown_endpoint"

    def __init__(self, message: str, *, status: int) -> None:
        super().__init__(message)
        self.status = status  # type: ignore[misc]


class ErrorResponses:
    """Writes errors in the dialect of the path. `dialects` are by the beginning or the end of a
    path. The first one counts."""

    def __init__(self, dialects: Mapping[str, Dialect]) -> None:
        self._dialects = {_AUTH: _login_refusal, **dialects}

    def response(self, error: TandemError, *, path: str) -> Response:
        dialects = self._dialects.items()
        found = (one for at, one in dialects if path.startswith(at) or path.endswith(at))
        response = next(found, _tinker_refusal)(error)
        if isinstance(error, Unauthenticated):
            # RFC 6750. For a refused token, the SDK exchanges its key again.
            marked = ', error="invalid_token"' if isinstance(error, TokenRefused) else ""
            response.headers["WWW-Authenticate"] = f'Bearer realm="tandem"{marked}'
        elif error.retry_after is not None:
            response.headers["Retry-After"] = f"{error.retry_after:.0f}"  # the SDK waits that long
        elif isinstance(error, RequestTimedOut):  # ends the rest of the request
            response.headers["Connection"] = "close"
        return response

    def register(self, app: FastAPI) -> None:
        app.add_exception_handler(TandemError, self._tandem_error)
        app.add_exception_handler(RequestValidationError, self._validation_error)
        app.add_exception_handler(HTTPException, self._http_error)

    async def _tandem_error(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, TandemError)
        return self.response(error, path=request.url.path)

    async def _validation_error(self, request: Request, error: Exception) -> Response:
        """Answer wrong fields with 400, because the wire protocol has no 422. A model's validator
        may raise the error itself."""
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        where = first["loc"][1:]
        refused = first.get("ctx", {}).get("error")
        if not isinstance(refused, TandemError):
            param = str(where[0]) if where else ""
            refused = InvalidParameter(fault(where, first["msg"]), param=param)
        return self.response(refused, path=request.url.path)

    async def _http_error(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path = request.url.path
        allowed = ", ".join(_methods_at(request)) if error.status_code == 405 else ""
        advice = (
            f"; allowed: {allowed}"
            if allowed
            else _advice(request, known=next(filter(path.startswith, self._dialects), ""))
        )
        sentence = f"this server does not answer {request.method} {path}{advice}"
        response = self.response(UnknownEndpoint(sentence, status=error.status_code), path=path)
        if allowed:
            response.headers["Allow"] = allowed
        return response


def _tinker_refusal(error: TandemError, **more: str) -> Response:
    """`{"error": sentence, "type": word, "category": "user" | "server"}`. Never 409, and never 5xx
    for a user's mistake, because the SDK repeats those for five minutes."""
    body = {"error": error.message, "type": error.type, "category": error.category}
    return json_response({**body, **error.details, **more}, status=error.status)


def _login_refusal(error: TandemError) -> Response:
    """Repeat the sentence in `detail`, the only field that the `tinker` command shows at login."""
    return _tinker_refusal(error, detail=error.message)


def json_response(content: object, *, status: int = 200) -> Response:
    return Response(orjson.dumps(content), status_code=status, media_type=JSON)


def _advice(request: Request, *, known: str) -> str:
    """Suggest a path to a client with a wrong base address. Under the prefix `known`, list all
    routes."""
    routes = [route for route in request.app.routes if isinstance(route, Route)]
    path = request.url.path
    likely = ["/v1" + path, "/api" + path, "/api/v1" + path, "/" + path[1:].partition("/")[2]]
    for other in likely:
        scope = {**request.scope, "path": other}
        if any(route.matches(scope)[0] is Match.FULL for route in routes):
            return f"; {other} is there"
    if not known:
        return ""
    names = dict.fromkeys(route.path for route in routes if route.path.startswith(known))
    return f"; this server has {', '.join(names)}"


def _methods_at(request: Request) -> list[str]:
    """Return all methods of the path, since the router only knows those of its first route."""
    routes = [route for route in request.app.routes if isinstance(route, Route)]
    matching = (route for route in routes if route.matches(request.scope)[0] is not Match.NONE)
    first = next(matching)
    same = (route.methods or set() for route in routes if route.path == first.path)
    return sorted(set[str]().union(*same))
