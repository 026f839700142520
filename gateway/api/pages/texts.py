"""Numbers, times and foreign text as people read them."""

from __future__ import annotations

import math
import re
import time

import orjson

_INVISIBLE = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]"
)


def figure(value: object) -> str:
    """Return a number with four significant digits, such as `0.1235`, `12,300` or `1.2e-06`, and
    other values as text."""
    if not isinstance(value, int | float) or not math.isfinite(value):
        return "–" if value is None else str(value)
    if value == int(value) and abs(value) < 1e7:
        return f"{int(value):,}"
    if 1e-4 <= abs(value) < 1e7:
        digits = max(0, 3 - math.floor(math.log10(abs(value))))
        text = f"{value:,.{digits}f}"
        return text.rstrip("0").rstrip(".") if "." in text else text
    return f"{value:.3g}"


def shade(logprob: float) -> int:
    """Return the shade of a token: 0 for a probability near 1, 9 below about 1 in 1,000."""
    return min(9, int(-logprob * 1.3))


def clock(at: float, dated: bool = False) -> str:
    """Return a time of day in UTC, with the day if `dated`. `at` is in seconds since 1970."""
    return time.strftime("%d %b %H:%M" if dated else "%H:%M", time.gmtime(at))


def iso(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at))


def ago(at: float) -> str:
    """Return how long ago a time was, such as `5 min ago`, and the day after a week."""
    seconds = max(0.0, time.time() - at)
    for unit, name in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= unit:
            within = seconds < 7 * 86_400
            return f"{seconds // unit:.0f} {name} ago" if within else clock(at, dated=True)
    return "just now"


def compact(value: object) -> str:
    """Return a value of a configuration as JSON, a number with all its digits."""
    return orjson.dumps(value, default=str).decode()


def visible(text: str) -> str:
    """Replace control characters, and those that turn the direction of the text around them."""
    return _INVISIBLE.sub("\ufffd", text)
