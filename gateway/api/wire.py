"""What the routes share: reading bodies within limits, JSON answers, errors."""

from __future__ import annotations

import asyncio
import datetime as dt
import io
from typing import TypeVar, cast

import orjson
import zstandard
from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from gateway.api.json_bounds import MOST_VALUES, check_json_size
from gateway.api.openai.errors import PREFIX as OPENAI
from gateway.api.openai.errors import openai_error
from gateway.auth.identity import Caller
from gateway.core import Gateway
from gateway.identifiers import request_id_of
from gateway.limits.ledger import Reservation
from tandem.errors import (
    InvalidRequest,
    MalformedPayload,
    Overloaded,
    PayloadTooLarge,
    RequestTimedOut,
    TandemError,
)

PROTOBUF = "application/x-protobuf"
JSON = "application/json"
AUTH = "/api/v1/auth/"

SMALL_BODY = 2**20
"""Bytes of a request that is kept as it is, in the database or in memory until its turn."""
_PREFIX_BYTES = 4096
_QUICKLY_DECOMPRESSED = 64 * 2**10
_ZSTD_PIECE = 2**20
_ZSTD_WINDOW = 8 * 2**20
"""The memory that a frame may ask for: what RFC 8878 recommends every decoder to give, and what
no compression level but the `ultra` ones goes beyond."""

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
    repeats those for five minutes. Under `/v1/` it looks as OpenAI's clients want it."""
    if path.startswith(OPENAI):
        return openai_error(error)
    body: dict[str, object] = {
        "error": error.message,
        "type": error.type,
        "category": error.category,
        **error.details,
    }
    if path.startswith(AUTH):  # where the `tinker` command logs in, it shows `detail` alone
        body["detail"] = error.message
    response = json_response(body, status=error.status)
    if error.status == 429:
        seconds = error.retry_after if isinstance(error, Overloaded) else 1.0
        response.headers["Retry-After"] = f"{seconds:.0f}"  # the SDK waits as long
    if isinstance(error, RequestTimedOut):  # what still comes of it is of no use
        response.headers["Connection"] = "close"
    return response


async def read_body(request: Request, *, limit: int | None = None) -> bytes:
    """The body as sent, or decompressed where it says `Content-Encoding: zstd`.

    `limit` in bytes, `max_payload_bytes` if none is given. Raises `BodyTooLarge`, by its
    announced size, while it is read, or while it is decompressed; `MalformedPayload` for a
    damaged or unknown encoding; `RequestTimedOut`; `Overloaded` where the bodies that are being
    received take all the memory that they may.
    """
    most = gateway_of(request).settings.max_payload_bytes
    limit = most if limit is None else min(limit, most)
    lease: Reservation = request.state.body_lease
    raw = await _read_raw(request, limit=limit, lease=lease)
    encoding = request.headers.get("content-encoding", "identity")
    if encoding == "identity":
        return raw
    if encoding != "zstd":
        raise MalformedPayload(f"the content encoding {encoding[:40]!r} is unknown; known: zstd")
    if len(raw) <= _QUICKLY_DECOMPRESSED:
        body = _decompress(raw, limit)
    else:
        body = await asyncio.to_thread(_decompress, raw, limit)
    lease.more(len(body))
    return body


async def _read_raw(request: Request, *, limit: int, lease: Reservation) -> bytes:
    """What is refused by its length is not read, but for the first bytes, which say whose it is.
    The connection throws the rest away (`gateway/protocol.py`)."""
    announced = request.headers.get("content-length", "")
    size = int(announced) if announced.isascii() and announced.isdigit() else 0
    if size <= limit:
        lease.more(size)
    deadline = asyncio.get_running_loop().time() + gateway_of(request).settings.http.body_timeout
    chunks: list[bytes] = []
    read = 0
    more = True
    while more:
        chunk, more = await _next_chunk(request, deadline=deadline)
        chunks.append(chunk)
        read += len(chunk)
        if lease.amount < read <= limit:  # of a body that announced nothing
            lease.more(len(chunk))
        if read > limit or (size > limit and read >= _PREFIX_BYTES):
            break
    body = chunks[0] if len(chunks) == 1 else b"".join(chunks)
    if size > limit or read > limit:
        raise BodyTooLarge(
            f"the request has {announced or f'more than {limit}'} bytes, {limit} at most"
            f"{'' if limit == SMALL_BODY else ' (TANDEM_MAX_PAYLOAD_BYTES)'}; send less at once",
            prefix=body[:_PREFIX_BYTES],
        )
    return body


async def _next_chunk(request: Request, *, deadline: float) -> tuple[bytes, bool]:
    """One piece of the body, and whether there are more. `deadline` in the loop's time."""
    settings = gateway_of(request).settings.http
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout_at(min(loop.time() + settings.body_gap_timeout, deadline)):
            message = await request.receive()
    except TimeoutError:
        gateway_of(request).metrics.timeouts.labels(what="body").inc()
        raise RequestTimedOut(
            f"the body of the request did not arrive: nothing of it came for "
            f"{settings.body_gap_timeout:g} s, or not all of it within "
            f"{settings.body_timeout:g} s; send it again"
        ) from None
    if message["type"] == "http.disconnect":
        raise MalformedPayload("the client went away before its request was complete")
    return message.get("body", b""), message.get("more_body", False)


def _decompress(raw: bytes, limit: int) -> bytes:
    """In pieces, so that a few bytes that stand for very many take no more than the limit."""
    pieces: list[bytes] = []
    size = 0
    decompressor = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW)
    try:
        with decompressor.stream_reader(io.BytesIO(raw)) as reader:
            while size <= limit and (piece := reader.read(min(_ZSTD_PIECE, limit + 1 - size))):
                pieces.append(piece)
                size += len(piece)
    except zstandard.ZstdError as error:
        raise MalformedPayload(f"the body is not zstd, as its header says: {error}") from error
    body = b"".join(pieces)
    if size > limit:
        raise BodyTooLarge(
            f"the request has more than {limit} bytes when decompressed, which is the most "
            "allowed (TANDEM_MAX_PAYLOAD_BYTES)",
            prefix=body[:_PREFIX_BYTES],
        )
    return body


def parse(model: type[Model], body: bytes, *, most_values: int = MOST_VALUES) -> Model:
    """Raises `MalformedPayload` for what is no JSON, `InvalidRequest` for wrong fields,
    `PayloadTooLarge` for more values than a request of this kind has."""
    check_json_size(body, most_values=most_values)
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
