"""The routing fields of a forward_backward, read without its datums.

protobuf parses a message with the interpreter locked. For 62 MiB of empty map entries, which zstd
compresses to 6 KB, that takes 3 s and 1.2 GB. So a large body's fields are counted before protobuf
sees them, and its datums are left out."""

from __future__ import annotations

from google.protobuf.message import DecodeError

from gateway.api.request_body import SMALL_BODY, BodyTooLarge
from tandem.wire.v1 import tinker_pb2

ROUTING_BYTES = 256
"""More than run id and sequence number take at the beginning of a message."""
MOST_FIELDS = 2**15
"""Datums of a large batch, and its few other fields."""
_DATUMS = tinker_pb2.ForwardBackwardRequest.DATA_FIELD_NUMBER


def routing_of(payload: bytes) -> tinker_pb2.ForwardBackwardRouting:
    """Raises `DecodeError`, or `BodyTooLarge` for too many fields."""
    if len(payload) > SMALL_BODY:
        payload = _without_datums(payload)
    return tinker_pb2.ForwardBackwardRouting.FromString(payload)


def _without_datums(payload: bytes) -> bytes:
    kept = bytearray()
    at = fields = 0
    try:
        while at < len(payload):
            start, fields = at, fields + 1
            tag, at = _varint(payload, at)
            match tag & 7:
                case 0:
                    _, at = _varint(payload, at)
                case 1:
                    at += 8
                case 2:
                    size, at = _varint(payload, at)
                    at += size
                case 5:
                    at += 4
                case wire_type:
                    raise DecodeError(f"there is no wire type {wire_type}")
            if tag >> 3 != _DATUMS:
                kept += payload[start:at]
            if fields > MOST_FIELDS or len(kept) > SMALL_BODY:
                raise BodyTooLarge(
                    f"the batch has more than {MOST_FIELDS} datums, or more than {SMALL_BODY} "
                    "bytes besides them; send less at once",
                    prefix=payload[:ROUTING_BYTES],
                )
    except IndexError:
        at = len(payload) + 1
    if at > len(payload):
        raise DecodeError("the message is cut")
    return bytes(kept)


def _varint(payload: bytes, at: int) -> tuple[int, int]:
    """Return the number of variable length at this position, and the position after it."""
    value = shift = 0
    while (byte := payload[at]) >= 0x80:
        value |= (byte & 0x7F) << shift
        shift += 7
        at += 1
        if shift > 63:
            raise DecodeError("a number is too long")
    return value | byte << shift, at + 1
