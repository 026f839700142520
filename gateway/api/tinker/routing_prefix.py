"""The run and the place in its log, out of the first bytes of a message that cannot be parsed.

Protobuf writers put fields in the order of their numbers, and these are the first two.
"""

from __future__ import annotations

from dataclasses import dataclass

_MODEL_ID_TAG = (1 << 3) | 2  # field 1, length-delimited
_SEQ_ID_TAG = (2 << 3) | 0  # field 2, varint


@dataclass(frozen=True)
class RoutingPrefix:
    run_id: str
    seq_id: int


def read_routing_prefix(prefix: bytes) -> RoutingPrefix | None:
    """None where the bytes do not begin with a run id and a seq_id.

    Literal example: `b"\\n\\x03run\\x10\\x05"` gives `RoutingPrefix(run_id="run", seq_id=5)`.
    """
    if len(prefix) < 2 or prefix[0] != _MODEL_ID_TAG:
        return None
    length, start = _varint(prefix, 1)
    end = start + length
    if length < 1 or end >= len(prefix) or prefix[end] != _SEQ_ID_TAG:
        return None
    seq_id, after = _varint(prefix, end + 1)
    if seq_id < 1 or after <= end + 1:
        return None
    try:
        return RoutingPrefix(run_id=prefix[start:end].decode(), seq_id=seq_id)
    except UnicodeDecodeError:
        return None


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """The number and the place behind it; (0, `at`) where there is none of at most 5 bytes."""
    value = 0
    for index, byte in enumerate(data[at : at + 5]):
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return value, at + index + 1
    return 0, at
