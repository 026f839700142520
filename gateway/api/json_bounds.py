"""How much a JSON body may hold. `{},` is three bytes, and half a kilobyte when it is read.

What is counted is counted in the bytes, before anything is made of them; commas and brackets
in texts count, too.
"""

from __future__ import annotations

from pydantic import FailFast

from tandem.errors import PayloadTooLarge

MOST_VALUES = 2**16
"""Of an ordinary request."""
MOST_TOKENS = 2**22
"""Values of a request for samples, nearly all of which are token ids."""
_MOST_BRACKETS = 2**17


class FirstFault(FailFast):
    """Of millions of wrong items of a list, the first is reported: a report is a hundred times
    larger than an item."""

    __hash__ = object.__hash__  # as a part of a union needs it


def check_json_size(body: bytes, *, most_values: int) -> None:
    """Raises `PayloadTooLarge`."""
    values = body.count(b",")
    if values > most_values:
        raise PayloadTooLarge(f"the request has {values} values, {most_values} at most")
    brackets = body.count(b"{") + body.count(b"[")
    if brackets > _MOST_BRACKETS:
        raise PayloadTooLarge(
            f"the request has {brackets} lists and objects, {_MOST_BRACKETS} at most"
        )
