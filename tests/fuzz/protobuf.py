"""Mutations of protobuf messages: their fields, their encoding, their bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from tandem.wire.v1 import tinker_pb2

_INTEGERS = (0, 1, -1, 2, 3, 4, 7, 63, 64, 65, 127, 128, 255, 256, 65_536, 2**31 - 1, -(2**31))
_LONG_INTEGERS = (*_INTEGERS, 2**31, 2**32, 2**53, 2**62, 2**63 - 1, -(2**63))
_NUMBERS = (0.0, -0.0, 1.0, -1.0, 0.2, 1e-300, 1e300, float("inf"), float("-inf"), float("nan"))
_TEXTS = (
    "", "custom", "cross_entropy", "target_tokens", "weights", "loss_id", "\x00",
    "../../etc/passwd", "é" * 40, "x" * 5000, "\U0010ffff", "%s%n{0}",
)  # fmt: skip
_NUMBER_BYTES = (
    b"\x00\x00\xc0\x7f",  # NaN
    b"\x00\x00\x80\x7f",  # infinity
    b"\xff\xff\xff\xff",
    b"\xff\xff\xff\x7f",
    b"\x00\x00\x00\x80",
    b"\xff\xff\xff\xff\xff\xff\xff\x7f",
    b"\x00\x00\x00\x00\x00\x00\x00\x80",
)

Request = tinker_pb2.ForwardBackwardRequest
BytesMutation = Callable[[Random, bytes, bytes], bytes]


def mutate(rng: Random, seed: Request, other: Request) -> bytes:
    """Return the mutated bytes of `seed`, with parts of `other`."""
    message = Request()
    message.CopyFrom(seed)
    if rng.random() < 0.75:
        for _ in range(rng.choice((1, 1, 1, 2, 4))):
            _mutate_field(rng, message)
    encoded = message.SerializeToString()
    if rng.random() < 0.35:
        for _ in range(rng.choice((1, 1, 2, 5))):
            encoded = rng.choice(_OF_BYTES)(rng, encoded, other.SerializeToString())
    return encoded


# --- Fields ----------------------------------------------------------------------------------


def _mutate_field(rng: Random, message: Message) -> None:
    """Change one field of the message, or of a message in it."""
    while True:
        fields = [f for f in message.DESCRIPTOR.fields if f.name not in ("model_id", "seq_id")]
        given = [f for f, _ in message.ListFields() if f in fields]
        field = rng.choice(given if given and rng.random() < 0.9 else fields)
        if isinstance(message, Request) and rng.random() < 0.8:
            field = message.DESCRIPTOR.fields_by_name["data"]
        inner = _inner(rng, message, field)
        if inner is None or rng.random() < 0.15:
            break
        message = inner
    if field.is_repeated:
        _mutate_repeated(rng, message, field)
    elif field.message_type is not None:
        message.ClearField(field.name) if rng.random() < 0.5 else getattr(
            message, field.name
        ).SetInParent()
    else:
        setattr(message, field.name, _value(rng, field, getattr(message, field.name)))


def _inner(rng: Random, message: Message, field: FieldDescriptor) -> Message | None:
    if field.message_type is None:
        return None
    value = getattr(message, field.name)
    if not field.is_repeated:
        return value if message.HasField(field.name) else None
    if _is_map(field):
        inner_type = field.message_type.fields_by_name["value"].message_type
        return value[rng.choice(sorted(value))] if value and inner_type is not None else None
    return rng.choice(value) if len(value) else None


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def _mutate_repeated(rng: Random, message: Message, field: FieldDescriptor) -> None:
    value = getattr(message, field.name)
    if _is_map(field):
        _mutate_map(rng, value, field)
    elif field.message_type is not None:
        if not len(value) or rng.random() < 0.2:
            value.add()
        elif rng.random() < 0.5:
            value.append(rng.choice(value))
        else:
            del value[rng.randrange(len(value))]
    else:
        given = list(value)
        match rng.randrange(4):
            case 0:
                given.append(_value(rng, field, 0))
            case 1 if given:
                given.pop(rng.randrange(len(given)))
            case 2 if given:
                given[rng.randrange(len(given))] = _value(rng, field, given[0])
            case _:
                given = [_value(rng, field, 0) for _ in range(rng.choice((0, 1, 2, 3, 9)))]
        del value[:]
        value.extend(given)


def _mutate_map(rng: Random, value: object, field: FieldDescriptor) -> None:
    inner = field.message_type.fields_by_name["value"]
    keys = sorted(value)  # type: ignore[call-overload]
    if keys and rng.random() < 0.5:
        del value[rng.choice(keys)]  # type: ignore[attr-defined]
        return
    key = rng.choice([*keys, *_TEXTS])
    if inner.message_type is None:
        value[key] = _value(rng, inner, 0.0)  # type: ignore[index]
    elif keys:
        value[key].CopyFrom(value[rng.choice(keys)])  # type: ignore[index]
    else:
        value[key].SetInParent()  # type: ignore[index]


def _value(rng: Random, field: FieldDescriptor, before: object) -> object:
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_INT32:
            return rng.choice(_INTEGERS)
        case FieldDescriptor.CPPTYPE_INT64:
            return rng.choice(_LONG_INTEGERS)
        case FieldDescriptor.CPPTYPE_ENUM:
            return rng.choice((0, 1, 2, 3, 4, 5, 99, -1, 2**31 - 1))
        case FieldDescriptor.CPPTYPE_BOOL:
            return not before
        case FieldDescriptor.CPPTYPE_DOUBLE:
            return rng.choice(_NUMBERS)
        case FieldDescriptor.CPPTYPE_STRING if field.type == FieldDescriptor.TYPE_BYTES:
            return _some_bytes(rng, bytes(before or b""))  # type: ignore[arg-type]
        case _:
            return rng.choice(_TEXTS)


def _some_bytes(rng: Random, before: bytes) -> bytes:
    match rng.randrange(6):
        case 0:
            return before[: rng.randrange(len(before) + 1)]
        case 1:
            return before + rng.randbytes(rng.choice((1, 2, 4, 8, 64)))
        case 2:
            return rng.randbytes(len(before))
        case 3:
            return before * rng.choice((0, 2, 3))
        case _ if len(before) >= 8:
            part = rng.choice(_NUMBER_BYTES)
            at = rng.randrange(len(before) // 4) * 4
            return (before[:at] + part + before[at + len(part) :])[: max(len(before), 8)]
        case _:
            return rng.choice(_NUMBER_BYTES)


# --- Bytes -----------------------------------------------------------------------------------


def _truncate(rng: Random, data: bytes, _other: bytes) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def _flip_bits(rng: Random, data: bytes, _other: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8, 32))):
        if changed:
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _splice(rng: Random, data: bytes, other: bytes) -> bytes:
    start = rng.randrange(len(other) + 1)
    part = other[start : start + rng.choice((1, 4, 16, 64, 256))]
    at = rng.randrange(len(data) + 1)
    return data[:at] + part + data[at + rng.choice((0, len(part))) :]


def _append(_rng: Random, data: bytes, other: bytes) -> bytes:
    """Join two messages. The result is one message with the fields of both."""
    return data + other


def _random(rng: Random, _data: bytes, _other: bytes) -> bytes:
    return rng.randbytes(rng.choice((0, 1, 2, 16, 100, 5000)))


def _long_length(rng: Random, data: bytes, _other: bytes) -> bytes:
    """Add a field that claims to be far longer than the message."""
    tag = bytes([rng.randrange(1, 16) << 3 | 2])
    length = rng.choice((b"\x7f", b"\xff\xff\x7f", b"\xff\xff\xff\xff\x07", b"\xff" * 9 + b"\x01"))
    at = rng.choice((0, len(data), rng.randrange(len(data) + 1)))
    return data[:at] + tag + length + data[at:]


def _wire_type(rng: Random, data: bytes, _other: bytes) -> bytes:
    tag = rng.randrange(0, 256)
    at = rng.choice((0, len(data)))
    return data[:at] + bytes([tag]) + rng.randbytes(rng.choice((0, 1, 4, 8))) + data[at:]


def _groups(rng: Random, data: bytes, _other: bytes) -> bytes:
    """Nest groups as deep as a parser may recurse."""
    depth = rng.choice((1, 50, 99, 101, 5000, 100_000))
    number = rng.choice((3, 9, 15))
    closing = bytes([number << 3 | 4]) * rng.choice((depth, 0))
    return data + bytes([number << 3 | 3]) * depth + closing


def _nested(rng: Random, data: bytes, _other: bytes) -> bytes:
    inner = b""
    for _ in range(rng.choice((3, 40, 120, 400))):
        inner = b"\x1a" + _varint(len(inner)) + inner
    return data + inner


def _many_fields(rng: Random, data: bytes, _other: bytes) -> bytes:
    """Add many empty datums: every two bytes become an object."""
    return data + rng.choice((b"\x1a\x00", b"\x2a\x00", b"\x78\x01")) * rng.choice(
        (10, 1000, 20_000)
    )


def _varint(number: int) -> bytes:
    parts = bytearray()
    while number > 127:
        parts.append(number & 127 | 128)
        number >>= 7
    return bytes([*parts, number])


_OF_BYTES: Sequence[BytesMutation] = (
    _truncate, _truncate, _flip_bits, _flip_bits, _flip_bits, _splice, _splice, _append,
    _random, _long_length, _wire_type, _groups, _nested, _many_fields,
)  # fmt: skip
