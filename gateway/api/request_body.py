"""Request bodies: read within limits of bytes, time and memory, decompressed, parsed as JSON.

`BoundedRequest` is the request that every path operation gets (see `routing.py`), so that
FastAPI itself parses bodies that are bounded already.
"""

from __future__ import annotations

import asyncio
from typing import TypeVar, cast

import pydantic_core
import zstandard
from pydantic import BaseModel, FailFast, ValidationError
from starlette.requests import Request
from starlette.types import Receive, Scope

from gateway.core import Gateway
from gateway.limits import Reservation
from tandem.errors import InvalidRequest, MalformedPayload, PayloadTooLarge, RequestTimedOut

JSON = "application/json"
PROTOBUF = "application/x-protobuf"

SMALL_BODY = 2**20
"""Bytes of a request that is kept as it is, in the database or in memory, until its turn."""
MOST_VALUES = 2**16
"""JSON values in an ordinary request."""
MOST_TOKENS = 2**22
"""JSON values in a request for samples, nearly all of which are token ids."""
_MOST_BRACKETS = 2**17
PREFIX_BYTES = 4096
_QUICKLY_DECOMPRESSED = 64 * 2**10
_ZSTD_WINDOW = 8 * 2**20
"""The memory that a frame may ask for: what RFC 8878 recommends every decoder to give, and what
no compression level but the `ultra` ones exceeds."""

Model = TypeVar("Model", bound=BaseModel)


class BodyTooLarge(PayloadTooLarge):
    """Carries the first bytes of the body, which name the run and the sequence number."""

    type = PayloadTooLarge.type

    def __init__(self, message: str, *, prefix: bytes) -> None:
        super().__init__(message)
        self.prefix = prefix


class FirstFault(FailFast):
    """Report only the first of a list's wrong items: a report is a hundred times larger than an
    item, and there may be millions."""

    __hash__ = object.__hash__  # as a part of a union needs it


class BoundedRequest(Request):
    """A request whose body is read, decompressed and parsed within limits, once.

    `body_limit` in bytes; None: `max_payload_bytes`. `most_values`: JSON values that it may hold.
    """

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        *,
        body_limit: int | None = None,
        most_values: int = MOST_VALUES,
    ) -> None:
        super().__init__(scope, receive)
        self._gateway = cast(Gateway, self.app.state.gateway)
        most = self._gateway.settings.max_payload_bytes
        self._limit = most if body_limit is None else min(body_limit, most)
        self._most_values = most_values
        self._content: bytes | None = None
        self._parsed: object = None

    async def body(self) -> bytes:
        """Return the body as sent, or decompressed where it says `Content-Encoding: zstd`.

        Raises:
            BodyTooLarge: by its announced size, while it is read, or while it is decompressed.
            MalformedPayload: for a damaged or unknown encoding.
            RequestTimedOut: where it arrives too slowly.
            Overloaded: where the bodies being received take all the memory that they may.
        """
        if self._content is None:
            self._content = await self._read()
        return self._content

    async def json(self) -> object:
        """Return the parsed body. Raises as `body` and `parse_json`."""
        if self._parsed is None:
            self._parsed = parse_json(await self.body(), most_values=self._most_values)
        return self._parsed

    async def _read(self) -> bytes:
        reservation: Reservation = self.state.body_reservation
        raw = await self._receive_all(reservation)
        encoding = self.headers.get("content-encoding", "identity")
        if encoding == "identity":
            return raw
        if encoding != "zstd":
            raise MalformedPayload(f"unknown content encoding {encoding[:40]!r}; known: zstd")
        if len(raw) <= _QUICKLY_DECOMPRESSED:
            body = _decompress(raw, self._limit)
        else:
            body = await asyncio.to_thread(_decompress, raw, self._limit)
        reservation.extend(len(body))
        return body

    async def _receive_all(self, reservation: Reservation) -> bytes:
        """Receive the body, or, where its announced length is refused, only its first bytes. The
        connection discards the rest (`gateway/http_connection.py`)."""
        limit = self._limit
        announced = self.headers.get("content-length", "")
        size = int(announced) if announced.isascii() and announced.isdigit() else 0
        if size <= limit:
            reservation.extend(size)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._gateway.settings.http.body_timeout
        chunks: list[bytes] = []
        read = 0
        more = True
        most = limit if size <= limit else PREFIX_BYTES - 1
        while more and read <= most:
            chunk, more = await self._next_chunk(deadline=deadline)
            chunks.append(chunk)
            read += len(chunk)
            if reservation.amount < read <= limit:  # of a body that announced no length
                reservation.extend(len(chunk))
        body = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        if size > limit or read > limit:
            setting = "" if limit == SMALL_BODY else " (TANDEM_MAX_PAYLOAD_BYTES)"
            raise BodyTooLarge(
                f"the request has {announced or f'more than {limit}'} bytes, {limit} at most"
                f"{setting}; send less at once",
                prefix=body[:PREFIX_BYTES],
            )
        return body

    async def _next_chunk(self, *, deadline: float) -> tuple[bytes, bool]:
        """Return the next chunk and whether more follow. `deadline` in the loop's time."""
        settings = self._gateway.settings.http
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout_at(min(loop.time() + settings.body_gap_timeout, deadline)):
                message = await self.receive()
        except TimeoutError:
            self._gateway.metrics.timeouts.labels(what="body").inc()
            raise RequestTimedOut(
                f"the body of the request did not arrive: nothing of it came for "
                f"{settings.body_gap_timeout:g} s, or not all of it within "
                f"{settings.body_timeout:g} s; send it again"
            ) from None
        if message["type"] == "http.disconnect":
            raise MalformedPayload("the client went away before its request was complete")
        return message.get("body", b""), message.get("more_body", False)


def check_json_size(body: bytes, *, most_values: int = MOST_VALUES) -> None:
    """Raise `PayloadTooLarge` for more JSON values than a request of this kind has.

    `{},` is three bytes, and half a kilobyte once parsed, so the bytes are counted before
    anything is built from them; commas and brackets inside texts count, too.
    """
    values = body.count(b",")
    if values > most_values:
        raise PayloadTooLarge(f"the request has {values} values, {most_values} at most")
    brackets = body.count(b"{") + body.count(b"[")
    if brackets > _MOST_BRACKETS:
        raise PayloadTooLarge(
            f"the request has {brackets} lists and objects, {_MOST_BRACKETS} at most"
        )


def parse_json(body: bytes, *, most_values: int = MOST_VALUES) -> object:
    """Return the value of a JSON body. Raises `MalformedPayload` or `PayloadTooLarge`."""
    check_json_size(body, most_values=most_values)
    try:
        return pydantic_core.from_json(body)
    except ValueError as error:
        raise MalformedPayload(f"the body is not JSON: {error}") from error


def parse(model: type[Model], body: bytes, *, most_values: int = MOST_VALUES) -> Model:
    """Parse and validate a JSON body in one step, for routes that FastAPI does not parse for.

    Raises `MalformedPayload`, `InvalidRequest` for wrong fields, or `PayloadTooLarge`.
    """
    check_json_size(body, most_values=most_values)
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        if error.errors(include_url=False)[0]["type"] == "json_invalid":
            raise MalformedPayload(f"the body is not JSON: {first_fault(error)}") from error
        raise InvalidRequest(first_fault(error)) from error


def validate(model: type[Model], fields: object) -> Model:
    """Validate parsed JSON. Raises `InvalidRequest` for wrong fields."""
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise InvalidRequest(first_fault(error)) from error


def first_fault(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_context=False)[0]
    return fault(first["loc"], first["msg"])


def fault(where: tuple[int | str, ...], message: str) -> str:
    """Return the sentence for a wrong field, such as `"seq_id: Field required"`."""
    return f"{'.'.join(map(str, where))}: {message}" if where else message


def _decompress(raw: bytes, limit: int) -> bytes:
    """Decompress up to the limit, so that a few bytes that stand for many stop there. Only what is
    written of the memory that is asked for is taken."""
    decompressor = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW)
    try:
        with decompressor.stream_reader(raw) as reader:
            body = reader.read(limit + 1)
    except zstandard.ZstdError as error:
        raise MalformedPayload(f"the body is not zstd, as its header says: {error}") from error
    if len(body) > limit:
        raise BodyTooLarge(
            f"the request has more than {limit} bytes when decompressed, which is the most "
            "allowed (TANDEM_MAX_PAYLOAD_BYTES)",
            prefix=body[:PREFIX_BYTES],
        )
    return body
