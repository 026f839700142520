"""What the routes share: reading bodies within limits, JSON answers, errors."""

from __future__ import annotations

import datetime as dt
import io
from typing import TypeVar, cast

import orjson
import zstandard
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from gateway.core import Gateway
from gateway.identity import Caller
from gateway.names import request_id_of
from tandem.errors import (
    InvalidRequest,
    MalformedPayload,
    PayloadTooLarge,
    TandemError,
    UnknownRun,
    UnknownSession,
)

PROTOBUF = "application/x-protobuf"
JSON = "application/json"
AUTH = "/api/v1/auth/"

_DRAINED_FACTOR = 4
"""How much of a body that is too large is read, in multiples of the limit, before we answer:
a client that is still writing when the connection closes would not see the answer."""
_PREFIX_BYTES = 4096

Model = TypeVar("Model", bound=BaseModel)


class BodyTooLarge(PayloadTooLarge):
    """Carries the first bytes of the body, which name the run and the place in its log."""

    type = PayloadTooLarge.type

    def __init__(self, message: str, *, prefix: bytes) -> None:
        super().__init__(message)
        self.prefix = prefix


def gateway_of(request: Request) -> Gateway:
    return cast(Gateway, request.app.state.gateway)


def caller_of(request: Request) -> Caller:
    """Who asks: whose key or token came with the request."""
    return cast(Caller, request.state.caller)


def note_for_audit(request: Request, *, target: str, **detail: str) -> None:
    """What the audit log calls the thing that this request changes, where its path does not
    say it. Names alone: no key, no content."""
    request.state.audit_target = target
    request.state.audit_detail = detail


def address_of(request: Request, path: str) -> str:
    """A path of this server as an address that the client can reach."""
    base = gateway_of(request).settings.public_url or str(request.base_url)
    return base.rstrip("/") + path


def iso(seconds: float) -> str:
    return dt.datetime.fromtimestamp(seconds, tz=dt.UTC).isoformat()


def json_response(content: object, *, status: int = 200) -> Response:
    return Response(orjson.dumps(content), status_code=status, media_type=JSON)


def promise(owner: str, seq_id: int, **more: object) -> Response:
    """What an accepted request is answered with."""
    return json_response({"request_id": request_id_of(owner=owner, seq_id=seq_id), **more})


def error_response(error: TandemError, *, path: str = "") -> Response:
    """A request that was refused. Never 409, and never 5xx for a user's mistake: the SDK
    repeats those for five minutes."""
    body = {"error": error.message, "type": error.type, "category": error.category}
    if path.startswith(AUTH):  # where the `tinker` command logs in, it shows `detail` alone
        body["detail"] = error.message
    response = json_response(body, status=error.status)
    if error.status == 429:
        response.headers["Retry-After"] = "1"  # seconds; the SDK waits as long before a sample
    return response


async def read_body(request: Request) -> bytes:
    """The body as sent, or decompressed where it says `Content-Encoding: zstd`.

    Raises `BodyTooLarge`, by its announced size, while it is read, or while it is decompressed;
    `MalformedPayload` for a damaged or unknown encoding.
    """
    limit = gateway_of(request).settings.max_payload_bytes
    raw = await _read_raw(request, limit)
    encoding = request.headers.get("content-encoding", "identity")
    if encoding == "identity":
        return raw
    if encoding != "zstd":
        raise MalformedPayload(f"the content encoding {encoding!r} is unknown; known: zstd")
    return _decompress(raw, limit)


async def _read_raw(request: Request, limit: int) -> bytes:
    announced = request.headers.get("content-length", "")
    chunks: list[bytes] = []
    size = 0
    too_large = announced.isdigit() and int(announced) > limit
    prefix = b""
    try:
        async for chunk in request.stream():
            size += len(chunk)
            too_large = too_large or size > limit
            if not too_large:
                chunks.append(chunk)
                continue
            if len(prefix) < _PREFIX_BYTES:
                prefix = (prefix or b"".join(chunks)) + chunk
                prefix = prefix[:_PREFIX_BYTES]
                chunks.clear()
            if size > _DRAINED_FACTOR * limit:
                break
    except ClientDisconnect as error:
        raise MalformedPayload("the client went away before its request was complete") from error
    if too_large:
        raise BodyTooLarge(
            f"the request has {announced or f'more than {size}'} bytes, {limit} at most "
            "(TANDEM_MAX_PAYLOAD_BYTES); send fewer datums at once",
            prefix=prefix,
        )
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def _decompress(raw: bytes, limit: int) -> bytes:
    try:
        with zstandard.ZstdDecompressor().stream_reader(io.BytesIO(raw)) as reader:
            body = reader.read(limit + 1)
    except zstandard.ZstdError as error:
        raise MalformedPayload(f"the body is not zstd, as its header says: {error}") from error
    if len(body) > limit:
        raise BodyTooLarge(
            f"the request has more than {limit} bytes when decompressed, which is the most "
            "allowed (TANDEM_MAX_PAYLOAD_BYTES)",
            prefix=body[:_PREFIX_BYTES],
        )
    return body


def parse(model: type[Model], body: bytes) -> Model:
    """Raises `MalformedPayload` for what is no JSON, `InvalidRequest` for wrong fields."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        if first["type"] == "json_invalid":
            raise MalformedPayload(f"the body is not JSON: {first['msg']}") from error
        where = ".".join(str(part) for part in first["loc"])
        raise InvalidRequest(f"{where}: {first['msg']}" if where else first["msg"]) from error


def parse_query(model: type[Model], request: Request) -> Model:
    """The query as the model says. Raises `InvalidRequest` for wrong or unknown fields."""
    try:
        return model.model_validate(dict(request.query_params))
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise InvalidRequest(f"{where}: {first['msg']}" if where else first["msg"]) from error


async def require_run(gateway: Gateway, run_id: str) -> None:
    """Notes a sign of life of the run's session. Raises `SessionFinished` or `UnknownRun`."""
    session_id, _, _number = run_id.partition(":train:")
    if gateway.sessions.touch(session_id) is None:
        try:
            await gateway.sessions.require(session_id)
        except UnknownSession as error:
            raise UnknownRun(f"there is no training run {run_id!r} on this server") from error
