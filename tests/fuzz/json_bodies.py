"""Mutations of JSON values, including valid JSON that confuses most parsers."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from random import Random

Json = object


class Raw(str):
    """Text that goes into the body unchanged."""


def _deep(depth: int) -> Raw:
    return Raw("[" * depth + "]" * depth)


_VALUES: tuple[Json, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**64, 10**30, -(10**30),
    Raw("9" * 5000), 0.5, -0.0, 1e308, Raw("1e999"), Raw("NaN"), Raw("-Infinity"), "", " ", "x",
    "0", "²", "\x00", "../../../etc/passwd", "é́\u202e\U0001f600", Raw('"\\ud800"'),
    Raw('"\\u0000"'), "y" * 10_000, "tinker://",
    "tinker://s-0123456789ab:train:0/weights/../../x",
    "s-0123456789ab:train:99999999999999999999", "s-0123456789ab:sample:²:3",
    "s-0123456789ab:train:0:9999999999999999999", "s-0123456789ab:sample:0:²",
    "s-0123456789ab:train:0:4", "s-0123456789ab:sample:0:1",
    "tinker://s-0123456789ab:train:0/external_weights/export",
    "tinker://s-0123456789ab:train:²/weights/x", "tiny", [], {}, [[]], [None] * 20, [1] * 5000,
    [{}] * 200, {"": ""}, {"a": {"b": {"c": None}}}, {"x" * 2000: 1}, Raw("[1, 2"),
    Raw('{"a": 1, "a": 2}'), _deep(20), _deep(150), _deep(1000), _deep(100_000),
)  # fmt: skip

_NUMBERS = tuple(
    value
    for value in _VALUES
    if (isinstance(value, int | float) and not isinstance(value, bool))
    or (isinstance(value, Raw) and value[0] not in '"[{')
)
_TEXTS = tuple(
    value
    for value in _VALUES
    if isinstance(value, str) and (not isinstance(value, Raw) or value[0] == '"')
)

_Bytes = Callable[[Random, bytes], bytes]


def mutate(rng: Random, seed: Json) -> bytes:
    value = json.loads(json.dumps(seed))
    for _ in range(rng.choice((0, 1, 1, 1, 1, 2, 3))):
        value = _mutated(rng, value)
    body = render(value).encode("utf-8", "surrogatepass")
    if rng.random() < 0.12:
        body = rng.choice(_OF_BYTES)(rng, body)
    return body


def render(value: Json) -> str:
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(k)}:{render(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(render, value)) + "]"
    return json.dumps(value)


def _mutated(rng: Random, value: Json) -> Json:
    if isinstance(value, dict) and value and rng.random() < 0.93:
        changed = dict(value)
        key = rng.choice(sorted(changed))
        match rng.randrange(10):
            case 0:
                del changed[key]
            case 1:
                changed[rng.choice(("", "type", "extra", "__proto__", "x" * 300))] = _value(rng)
            case 2:
                changed[key] = changed[rng.choice(sorted(changed))]
            case _:
                changed[key] = _mutated(rng, changed[key])
        return changed
    if isinstance(value, list) and value and rng.random() < 0.7:
        items = list(value)
        at = rng.randrange(len(items))
        match rng.randrange(4):
            case 0:
                del items[at]
            case 1:
                items += items[: rng.choice((1, 10))]
            case _:
                items[at] = _mutated(rng, items[at])
        return items
    return _value(rng, value)


def _value(rng: Random, before: Json = None) -> Json:
    """Draw a value, mostly of the old one's kind, so that it reaches later checks."""
    if rng.random() < 0.7:
        if isinstance(before, str):
            return rng.choice(_TEXTS)
        if isinstance(before, bool):
            return not before
        if isinstance(before, int | float):
            return rng.choice(_NUMBERS)
    return rng.choice(_VALUES)


def _cut(rng: Random, body: bytes) -> bytes:
    return body[: rng.randrange(len(body) + 1)]


def _flip(rng: Random, body: bytes) -> bytes:
    changed = bytearray(body)
    for _ in range(rng.choice((1, 2, 8))):
        if changed:
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


_OF_BYTES: Sequence[_Bytes] = (
    _cut,
    _flip,
    lambda _rng, _body: b"",
    lambda _rng, body: b"\xef\xbb\xbf" + body,
    lambda _rng, body: body + b" {}",
    lambda _rng, body: body.decode("utf-8", "replace").encode("utf-16"),
    lambda _rng, _body: b"\xff\xfe" * 50,
    lambda rng, _body: rng.randbytes(rng.choice((1, 30, 3000))),
)
