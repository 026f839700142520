"""Errors as HTTP responses: the one place that turns an exception into an answer.

A dialect is how the routes under a prefix write their errors. The SDK's is the default; the
application registers others by prefix (`/v1/` for OpenAI's clients).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import orjson
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route

from gateway.api.request_body import JSON, fault
from tandem.errors import InvalidRequest, Overloaded, RequestTimedOut, TandemError

_AUTH = "/api/v1/auth/"


class InvalidField(InvalidRequest):
    """The field `param` of a request is wrong, or not offered."""

    type = InvalidRequest.type

    def __init__(self, message: str, *, param: str) -> None:
        super().__init__(message)
        self.param = param


class Dialect(Protocol):
    def refusal(self, error: TandemError) -> Response: ...
    def router_refusal(self, sentence: str, *, status: int) -> Response: ...


class TinkerDialect:
    """`{"error": sentence, "type": word, "category": "user" | "server"}`. Never 409, and never
    5xx for a user's mistake: the SDK repeats those for five minutes.

    `with_detail` repeats the sentence in `detail`: where the `tinker` command logs in, it shows
    nothing else.
    """

    def __init__(self, *, with_detail: bool = False) -> None:
        self._with_detail = with_detail

    def refusal(self, error: TandemError) -> Response:
        body: dict[str, object] = {
            "error": error.message,
            "type": error.type,
            "category": error.category,
            **error.details,
        }
        if self._with_detail:
            body["detail"] = error.message
        response = json_response(body, status=error.status)
        if error.status == 429:
            seconds = error.retry_after if isinstance(error, Overloaded) else 1.0
            response.headers["Retry-After"] = f"{seconds:.0f}"  # the SDK waits as long
        if isinstance(error, RequestTimedOut):  # the rest of the request is of no use
            response.headers["Connection"] = "close"
        return response

    def router_refusal(self, sentence: str, *, status: int) -> Response:
        body = {"error": sentence, "type": "unknown_endpoint", "category": "user"}
        return json_response(body, status=status)


class ErrorResponses:
    """Writes errors in the dialect of the path. `dialects` by path prefix."""

    def __init__(self, dialects: Mapping[str, Dialect]) -> None:
        self._dialects = {_AUTH: TinkerDialect(with_detail=True), **dialects}
        self._default = TinkerDialect()

    def response(self, error: TandemError, *, path: str) -> Response:
        return self._of(path).refusal(error)

    def register(self, app: FastAPI) -> None:
        """Make the application answer its exceptions with these."""
        app.add_exception_handler(TandemError, self._tandem_error)
        app.add_exception_handler(RequestValidationError, self._validation_error)
        app.add_exception_handler(HTTPException, self._http_error)

    def _of(self, path: str) -> Dialect:
        found = (dialect for at, dialect in self._dialects.items() if path.startswith(at))
        return next(found, self._default)

    async def _tandem_error(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, TandemError)
        return self.response(error, path=request.url.path)

    async def _validation_error(self, request: Request, error: Exception) -> Response:
        """Answer wrong fields with 400: FastAPI's own 422 is no status of the wire protocol. A
        validator of a model may raise the error itself."""
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        where = first["loc"][1:]
        refused = first.get("ctx", {}).get("error")
        if not isinstance(refused, TandemError):
            param = str(where[0]) if where else ""
            refused = InvalidField(fault(where, first["msg"]), param=param)
        return self.response(refused, path=request.url.path)

    async def _http_error(self, request: Request, error: Exception) -> Response:
        """Answer an unknown path (404), or a method that the path does not take (405)."""
        assert isinstance(error, HTTPException)
        path = request.url.path
        sentence = f"{request.method} {path}: {error.detail}"
        response = self._of(path).router_refusal(sentence, status=error.status_code)
        if error.status_code == 405:
            response.headers["Allow"] = ", ".join(_methods_at(request))
        return response


def json_response(content: object, *, status: int = 200) -> Response:
    return Response(orjson.dumps(content), status_code=status, media_type=JSON)


def _methods_at(request: Request) -> list[str]:
    """Return the methods of the path: the router reports those of its first route only."""
    routes = [route for route in request.app.routes if isinstance(route, Route)]
    matching = (route for route in routes if route.matches(request.scope)[0] is not Match.NONE)
    first = next(matching)
    same = (route.methods or set() for route in routes if route.path == first.path)
    return sorted(set[str]().union(*same))
