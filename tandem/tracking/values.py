"""Copies and encodes the user's numbers and rollouts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import orjson

_OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
_DEEPEST = 16
_FLOAT_BYTES, _INTEGER_BYTES = 20, 8


def as_number(value: object) -> float | None:
    """Return a metric's value, or None if it is no number.

    A scalar of numpy, torch or JAX is one, and so is an array of one element."""
    if isinstance(value, str | bytes):
        return None
    try:
        if hasattr(value, "item"):
            value = value.item()
        return None if isinstance(value, str | bytes) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None


def as_json_number(value: float) -> float | str:
    """Return a float for JSON, which has no NaN and no infinities: they become text."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def from_json_number(value: float | str | None) -> float:
    return math.nan if value is None else float(value)


def snapshot(value: Any, depth: int = 0) -> tuple[Any, int]:
    """Copy a field of a rollout, so that the loop may change it. Returns also its rough bytes.

    Lists of numbers are copied without a look at each element."""
    if isinstance(value, str | bytes):
        return value, len(value) + 2
    if value is None or isinstance(value, int | float):
        return value, _FLOAT_BYTES
    if depth == _DEEPEST:
        text = repr(value)
        return text, len(text)
    if isinstance(value, Mapping):
        size, fields = 2, {}
        for key, inner in value.items():
            fields[str(key)], bytes_ = snapshot(inner, depth + 1)
            size += len(str(key)) + 4 + bytes_
        return fields, size
    if hasattr(value, "tolist"):  # an array of numpy, torch or JAX
        value = value.tolist()
        if not isinstance(value, list):
            return snapshot(value, depth + 1)
    if isinstance(value, list | tuple):
        if value and isinstance(value[0], int | float):
            each = _INTEGER_BYTES if isinstance(value[0], int) else _FLOAT_BYTES
            return list(value), each * len(value)
        copies = [snapshot(inner, depth + 1) for inner in value]
        return [copy for copy, _ in copies], sum(size + 1 for _, size in copies)
    text = str(value)
    return text, len(text) + 2


def encoded(value: Any) -> bytes:
    """Return JSON. NaN and infinities are text, and an unknown object is its `str`.

    Raises `TypeError` for values that are nested too deeply."""
    try:
        text = orjson.dumps(value, default=_plain, option=_OPTIONS)
    except TypeError:
        return orjson.dumps(_cleaned(value), default=_plain, option=_OPTIONS)
    # orjson writes null for NaN, so only texts with a null need the slow way.
    return orjson.dumps(_cleaned(value), option=_OPTIONS) if b"null" in text else text


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _cleaned(value: Any) -> Any:
    """Replace values that JSON or orjson cannot write."""
    if isinstance(value, float):
        return as_json_number(value)
    if isinstance(value, int):  # JSON's readers have 64 bits
        return value if -(2**63) <= value < 2**63 else str(value)
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, Mapping):
        return {_cleaned(str(key)): _cleaned(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_cleaned(inner) for inner in value]
    return value if value is None else _cleaned(_plain(value))
