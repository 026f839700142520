"""Reads, decompresses and parses request bodies within limits of bytes, time and memory.

Every path operation gets a `BoundedRequest` (see `routing.py`), so FastAPI only parses bounded
bodies. Work of more than a millisecond runs in a thread, in turns of the owners."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from functools import partial
from typing import Annotated, NamedTuple, TypeVar, cast

import pydantic_core
import zstandard
from pydantic import BaseModel, FailFast, ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import Request
from starlette.types import Receive, Scope

from gateway.core import Gateway
from gateway.owners.limits import Reservation
from tandem.errors import InvalidRequest, MalformedPayload, PayloadTooLarge, RequestTimedOut

JSON = "application/json"
PROTOBUF = "application/x-protobuf"
_SEND_JSON = f"send JSON with Content-Type: {JSON}"

BODY_GAP_TIMEOUT = 30.0
"""Seconds between two parts of a body."""
BODY_TIMEOUT = 300.0
"""Seconds for a whole body."""
SMALL_BODY = 2**20
"""Bytes of a stored request, and of a compressed JSON body."""
MOST_VALUES = 2**16
"""JSON values in an ordinary request."""
MOST_TOKENS = 2**21
"""JSON values in a request for samples or in a batch, mostly token ids."""
_MOST_BRACKETS = 2**17
_MOST_QUOTES = 4 * MOST_VALUES
PREFIX_BYTES = 4096
_FREE_BYTES = 4096
"""Bytes of a body that always fit into the memory, so that heartbeats get through."""
_QUICKLY_DECOMPRESSED = 64 * 2**10
_QUICKLY_PARSED = 256 * 2**10
"""Bytes of JSON parsed within two milliseconds. A compressed body has a quarter, because its sender
may choose slow values."""
_PARSING_SHARE = 4
"""At most one in this many seconds parses large bodies, because Python holds the interpreter
lock."""
_ZSTD_WINDOW = 8 * 2**20
"""The largest memory of a frame: RFC 8878's recommendation, which only `ultra` levels exceed."""


class BodyBounds(NamedTuple):
    """Bytes of a body as it is sent and as it is decompressed, at most `max_payload_bytes`, and its
    JSON values."""

    sent: int
    decompressed: int = SMALL_BODY
    values: int = MOST_VALUES


STORED_BODY = BodyBounds(SMALL_BODY)
FIELDS_BODY = BodyBounds(4 * SMALL_BODY)
"""An ordinary request. An operation above `SMALL_BODY` is read, and fails at its turn in the
journal."""
TOKENS_BODY = BodyBounds(16 * SMALL_BODY, values=MOST_TOKENS)
"""A request for samples."""
FORM_BODY = BodyBounds(16 * 2**10)
"""A short form of a page. Decoding it takes two milliseconds."""
FILES_BODY = BodyBounds(sys.maxsize)
"""A request with files as text. It is large only if it is not compressed."""
PAYLOAD_BODY = BodyBounds(sys.maxsize, sys.maxsize, values=MOST_TOKENS)

Model = TypeVar("Model", bound=BaseModel)
Value = TypeVar("Value")


class BodyTooLarge(PayloadTooLarge):
    """Carries the body's first bytes, with the run and the sequence number."""

    type = PayloadTooLarge.type

    def __init__(self, message: str, *, prefix: bytes) -> None:
        super().__init__(message)
        self.prefix = prefix


class FirstFault(FailFast):
    """Report only a list's first wrong item, as a report is a hundred times larger than an item."""

    __hash__ = object.__hash__  # needed in a union


Ints = Annotated[list[int], FirstFault()]
Texts = Annotated[list[str], FirstFault()]


class BoundedRequest(Request):
    """A request with a body that is read, decompressed and parsed once, within bounds."""

    def __init__(self, scope: Scope, receive: Receive, bounds: BodyBounds) -> None:
        super().__init__(scope, receive)
        self._gateway = cast(Gateway, self.app.state.gateway)
        most = self._gateway.settings.max_payload_bytes
        self._limit = min(bounds.sent, most)
        self._decompressed_limit = min(bounds.decompressed, self._limit)
        self._encoding = self.headers.get("content-encoding", "identity")
        self.most_values = bounds.values if self._encoding == "identity" else MOST_VALUES
        self._content: bytes | None = None
        self._parsed: object = None

    async def body(self) -> bytes:
        """Return the body, decompressed for `Content-Encoding: zstd`.

        Raises:
          BodyTooLarge: by its announced size, or while it is read or decompressed.
          MalformedPayload: for a damaged or unknown encoding.
          RequestTimedOut: if it arrives too slowly.
          Overloaded: if arriving bodies use all their memory."""
        if self._content is None:
            self._content = await self._read()
        return self._content

    async def json(self) -> object:
        if self._parsed is None:
            self._parsed = await self.read(partial(parse_json, most_values=self.most_values))
        return self._parsed

    async def read(
        self, parse: Callable[[bytes], Value], *, quickly: int = _QUICKLY_PARSED
    ) -> Value:
        """Parse the body: up to `quickly` bytes at once, larger ones in a thread, one at a time.
        Raises as `body` and `parse`."""
        body = await self.body()
        if self._encoding != "identity":
            quickly //= 4
        if len(body) <= quickly:
            return parse(body)
        loop = asyncio.get_running_loop()
        async with self._gateway.parsing.turn(self._reservation.owner):
            started = loop.time()
            try:
                return await asyncio.to_thread(parse, body)
            finally:
                await asyncio.sleep((_PARSING_SHARE - 1) * (loop.time() - started))

    @property
    def _reservation(self) -> Reservation:
        return cast(Reservation, self.state.body_reservation)

    async def _read(self) -> bytes:
        raw = await self._receive_all()
        if self._encoding == "identity":
            return raw
        if self._encoding != "zstd":
            raise MalformedPayload(f"unknown content encoding {self._encoding[:40]!r}; known: zstd")
        try:
            return await self._decompressed(raw)
        except zstandard.ZstdError as error:
            raise MalformedPayload(f"the body is not zstd, as its header says: {error}") from error

    async def _decompressed(self, raw: bytes) -> bytes:
        """Decompress up to the limit, in reserved memory. A frame with a larger stated size is
        refused at once."""
        limit, stated = self._decompressed_limit, zstandard.frame_content_size(raw)  # -1: none
        most = limit if stated < 0 else stated
        if most > limit:
            body = _decompress(raw, PREFIX_BYTES)
        else:
            self._reservation.extend(most)
            if most <= _QUICKLY_DECOMPRESSED:
                body = _decompress(raw, most + 1)
            else:
                async with self._gateway.decompression.turn(self._reservation.owner):
                    body = await asyncio.to_thread(_decompress, raw, most + 1)
        if max(stated, len(body)) > limit:
            hint = ", or send it uncompressed" if limit < self._limit else ""
            size = f"more than {limit} bytes when decompressed"
            raise self._too_large(body, size=size, limit=limit, hint=hint)
        if len(body) > most:
            raise MalformedPayload(f"the body is not zstd of {most} bytes, as its header says")
        self._reservation.shrink(most - len(body))
        return body

    async def _receive_all(self) -> bytes:
        """Receive the body, or only its first bytes if its announced length is refused. The
        connection discards the rest (`gateway/api/http_connection.py`)."""
        limit, reservation = self._limit, self._reservation
        announced = self.headers.get("content-length", "")
        size = int(announced) if announced.isascii() and announced.isdigit() else 0
        if _FREE_BYTES < size <= limit:
            reservation.extend(size)
        deadline = asyncio.get_running_loop().time() + BODY_TIMEOUT
        chunks: list[bytes] = []
        read = 0
        more = True
        most = limit if size <= limit else PREFIX_BYTES - 1
        while more and read <= most:
            chunk, more = await self._next_chunk(deadline=deadline)
            chunks.append(chunk)
            read += len(chunk)
            if max(reservation.amount, _FREE_BYTES) < read <= limit:  # no length was announced
                reservation.extend(read - reservation.amount)
        body = b"".join(chunks)
        if size > limit or read > limit:
            raise self._too_large(
                body, size=f"{announced or f'more than {limit}'} bytes", limit=limit
            )
        return body

    async def _next_chunk(self, *, deadline: float) -> tuple[bytes, bool]:
        """Return the next chunk and whether more follow. `deadline` is in loop time."""
        arrived = self.scope["state"].get("body_arrived")  # all of it is here
        gap_ends = asyncio.get_running_loop().time() + BODY_GAP_TIMEOUT
        try:
            async with asyncio.timeout_at(None if arrived else min(gap_ends, deadline)):
                message = await self.receive()
        except TimeoutError:
            self._gateway.metrics.timeouts.labels(what="body").inc()
            raise RequestTimedOut(
                f"the body of the request did not arrive: no byte came for "
                f"{BODY_GAP_TIMEOUT:g} s, or it was not complete within "
                f"{BODY_TIMEOUT:g} s; send it again"
            ) from None
        if message["type"] == "http.disconnect":
            raise MalformedPayload("the client went away before its request was complete")
        return message.get("body", b""), message.get("more_body", False)

    def _too_large(self, body: bytes, *, size: str, limit: int, hint: str = "") -> BodyTooLarge:
        is_set = limit == self._gateway.settings.max_payload_bytes
        setting = " (TANDEM_MAX_PAYLOAD_BYTES)" if is_set else ""
        return BodyTooLarge(
            f"the request has {size}, {limit} at most{setting}; send less at once{hint}",
            prefix=body[:PREFIX_BYTES],
        )


def check_content_type(sent: str | None) -> None:
    """Refuse a type other than JSON, as curl and forms send. A missing type means JSON. Raises
    `MalformedPayload`."""
    kind = (sent or JSON).partition(";")[0].strip().lower()
    if kind != JSON and not kind.endswith("+json"):
        raise MalformedPayload(f"the body is of the type {kind[:80]!r}; {_SEND_JSON}")


def check_json_size(body: bytes, *, most_values: int = MOST_VALUES) -> None:
    """Raise `PayloadTooLarge` for too many JSON values.

    `{},` is three bytes, and half a kilobyte once parsed. So commas and brackets are counted first,
    outside of texts if these are few."""
    values, brackets = _count_values(body)
    if values > most_values or brackets > _MOST_BRACKETS:
        values, brackets = _count_values(_without_texts(body))
    if values > most_values:
        raise PayloadTooLarge(
            f"the request has {values} JSON values, {most_values} at most; send less at once"
        )
    if brackets > _MOST_BRACKETS:
        raise PayloadTooLarge(
            f"the request has {brackets} lists and objects, {_MOST_BRACKETS} at most"
        )


def _count_values(body: bytes) -> tuple[int, int]:
    return body.count(b","), body.count(b"{") + body.count(b"[")


def _without_texts(body: bytes) -> bytes:
    """Return JSON without its texts, or with them if they are many."""
    plain = body.replace(rb"\\", b"").replace(rb"\"", b"")
    return plain if plain.count(b'"') > _MOST_QUOTES else b"".join(plain.split(b'"')[::2])


def parse_json(body: bytes, *, most_values: int = MOST_VALUES) -> object:
    """Parse a JSON body. Raises `MalformedPayload` or `PayloadTooLarge`."""
    check_json_size(body, most_values=most_values)
    try:
        return pydantic_core.from_json(body)
    except ValueError as error:
        raise MalformedPayload(f"the body is not JSON: {error}; {_SEND_JSON}") from error


def parse(model: type[Model], body: bytes, *, most_values: int = MOST_VALUES) -> Model:
    """Parse and validate a JSON body in one step, without FastAPI.

    Raises `MalformedPayload`, `InvalidRequest` for wrong fields, or `PayloadTooLarge`."""
    check_json_size(body, most_values=most_values)
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        if _errors(error)[0]["type"] == "json_invalid":
            raise MalformedPayload(
                f"the body is not JSON: {first_fault(error)}; {_SEND_JSON}"
            ) from error
        raise InvalidRequest(first_fault(error)) from error


def validate(model: type[Model], fields: object) -> Model:
    """Validate parsed JSON. Raises `InvalidRequest`."""
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise InvalidRequest(first_fault(error)) from error


def first_fault(error: ValidationError) -> str:
    first = _errors(error)[0]
    return fault(first["loc"], first["msg"])


def _errors(error: ValidationError) -> list[ErrorDetails]:
    """Leave out the input, which may be the whole request."""
    return error.errors(include_url=False, include_context=False, include_input=False)


def fault(where: tuple[int | str, ...], message: str) -> str:
    """Return the sentence for a wrong field, such as `"seq_id: Field required"`."""
    return f"{'.'.join(map(str, where))}: {message}" if where else message


def _decompress(raw: bytes, most: int) -> bytes:
    """Return at most `most` bytes of all frames. zstandard releases the interpreter's lock."""
    decompressor = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW)
    with decompressor.stream_reader(raw, read_across_frames=True) as reader:
        return reader.read(most)
