"""Patterns of the names that people choose. No other module has one.

A name becomes part of a path, address, label or log line unchanged. A label is only shown."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, Field

_FIRST, _FURTHER = "[A-Za-z0-9]", "[A-Za-z0-9._-]"
GROUP_PATTERN = rf"^{_FIRST}{_FURTHER}{{0,63}}$"
OWNER_PATTERN = rf"^{_FIRST}[A-Za-z0-9._@+-]{{0,63}}$"
_LABEL = r"[^\u0000-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]*"
"""No control characters, no line ends, and no characters that hide or reverse text."""
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
_RUN_ID = re.compile(r"[A-Za-z0-9_-]{1,64}:train:[0-9]{1,18}")
_MOST_MODEL_CHARACTERS = 200
_MOST_MODEL_PARTS = 3


def _check_label(text: str) -> str:
    if not re.fullmatch(_LABEL, text):
        raise ValueError("a label has printable characters only")
    return text


Label = Annotated[
    str, AfterValidator(_check_label), Field(json_schema_extra={"pattern": f"^{_LABEL}$"})
]


def is_name(text: str) -> bool:
    """Return whether the text can name a checkpoint or worker, and so a file."""
    return _NAME.fullmatch(text) is not None


def is_run_id(text: str) -> bool:
    return _RUN_ID.fullmatch(text) is not None


def is_model_name(text: str) -> bool:
    """Return whether the text is NAME, ORG/NAME or ORG/NAME/VARIANT: folders below a directory."""
    parts = text.split("/")
    whole = len(text) <= _MOST_MODEL_CHARACTERS and len(parts) <= _MOST_MODEL_PARTS
    return whole and all(map(is_name, parts))


def name_fault(name: str) -> str:
    if is_name(name):
        return ""
    return (
        f"the name {name[:140]!r} is not allowed: 1 to 128 of A-Z a-z 0-9 . _ -, "
        "and no dot in front"
    )


def model_name_fault(name: str) -> str:
    if is_model_name(name):
        return ""
    return (
        f"the model name {name[:210]!r} is not allowed: one to three parts with / between "
        "them, each 1 to 128 of A-Z a-z 0-9 . _ - and no dot in front; 200 characters in all"
    )
