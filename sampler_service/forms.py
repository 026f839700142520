"""What a sample must look like, as a client says it: a regex, a JSON schema, or choices.

This module knows what may be asked and how much; `form_compiler.py` whether it makes sense.
"""

from __future__ import annotations

import string
from dataclasses import dataclass
from typing import Literal

from tandem.errors import StructuredOutputInvalid
from tandem.v1 import sampler_pb2

MAX_REGEX_BYTES = 16 * 1024
MAX_SCHEMA_BYTES = 64 * 1024
MAX_CHOICES = 1024
MAX_CHOICES_BYTES = 64 * 1024
_BOOLEAN = {"true": "{}", "false": '{"enum": []}'}
_PLAIN = frozenset(string.ascii_letters + string.digits)


@dataclass(frozen=True)
class Form:
    """Literal examples: `Form("regex", "[ab]+")`, `Form("json_schema", '{"type": "object"}')`."""

    kind: Literal["regex", "json_schema"]
    text: str


def parse_form(message: sampler_pb2.StructuredOutput) -> Form | None:
    """The form of a request; None when it has none. Raises `StructuredOutputInvalid`."""
    kind = message.WhichOneof("form")
    if kind is None:
        return None
    if kind == "regex":
        _check_size("the regex", message.regex, most=MAX_REGEX_BYTES)
        return Form("regex", message.regex)
    if kind == "json_schema":
        _check_size("the JSON schema", message.json_schema, most=MAX_SCHEMA_BYTES)
        # As a schema, true and false are objects of which all and nothing is an instance.
        schema = _BOOLEAN.get(message.json_schema.strip(), message.json_schema)
        return Form("json_schema", schema)
    if kind == "choice":
        choices = list(dict.fromkeys(message.choice.choices))
        if not 1 <= len(choices) <= MAX_CHOICES:
            raise StructuredOutputInvalid(
                f"choice lists {len(choices)} choices; 1 to {MAX_CHOICES} are possible"
            )
        _check_size("choice", "".join(choices), most=MAX_CHOICES_BYTES)
        return Form("regex", "|".join(f"(?:{_literal(choice)})" for choice in choices))
    if not message.json_object:
        raise StructuredOutputInvalid("json_object is false; leave it out where no form is wanted")
    return Form("json_schema", '{"type": "object"}')


def _check_size(name: str, text: str, *, most: int) -> None:
    size = len(text.encode())
    if size > most:
        raise StructuredOutputInvalid(f"{name} has {size} bytes; at most {most} are possible")


def _literal(text: str) -> str:
    """A regex that matches this text and nothing else."""
    return "".join(c if c in _PLAIN else f"\\x{{{ord(c):x}}}" for c in text)
