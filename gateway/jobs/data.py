"""Checks of a job's data: JSON lines in the format of the configuration's `method`.

A text of these formats is a string, or a list of messages with `role` and `content`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import orjson

from tandem.errors import InvalidField


def _is_messages(value: object) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(
            isinstance(each, dict)
            and isinstance(each.get("role"), str)
            and isinstance(each.get("content"), str)
            for each in value
        )
    )


def _is_text(value: object) -> bool:
    return isinstance(value, str) or _is_messages(value)


def _is_answer(value: object) -> bool:
    return isinstance(value, str)


def _is_label(value: object) -> bool:
    return isinstance(value, bool)


_KINDS: Mapping[Callable[[object], bool], str] = {
    _is_messages: "a list of messages with role and content",
    _is_text: "text, or a list of messages with role and content",
    _is_answer: "text",
    _is_label: "true or false",
}
_PAIR = {"prompt": _is_text, "completion": _is_text}
FORMATS: Mapping[str, tuple[Mapping[str, Callable[[object], bool]], ...]] = {
    "sft": ({"messages": _is_messages}, _PAIR),
    "dpo": ({"prompt": _is_text, "chosen": _is_text, "rejected": _is_text},),
    "kto": ({**_PAIR, "label": _is_label},),
    "grpo": ({"prompt": _is_text, "answer": _is_answer},),
}
"""The columns of each method, in one or several forms. Other columns are allowed."""


def checked_rows(name: str, text: str, method: str) -> bytes:
    """Return the content of a data file. Rows of an unknown method are JSON objects.

    Raises `InvalidField`, with the number of the line."""
    field = f"data.{name}"
    forms: set[tuple[str, ...]] = set()
    content = text.encode(errors="replace").strip() + b"\n"
    for number, line in enumerate(content.splitlines(), 1):
        fault, form = _fault(line, method)
        if fault:
            raise InvalidField(f"{field}: line {number} {fault}", field=field)
        forms.add(form)
        if len(forms) > 1:
            raise InvalidField(
                f"{field}: line {number} has other columns than the lines before", field=field
            )
    return content


def _fault(line: bytes, method: str) -> tuple[str, tuple[str, ...]]:
    """Return why a row does not fit, or "", and the columns of its form."""
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        return f"is not JSON: {error}", ()
    if not isinstance(row, dict):
        return "is not a JSON object", ()
    forms = FORMATS.get(method, ({},))
    for form in forms:
        if all(name in row for name in form):
            wrong = next((name for name in form if not form[name](row[name])), "")
            why = f"has a wrong {wrong}: it must be {_KINDS[form[wrong]]}" if wrong else ""
            return why, tuple(form)
    wanted = " or ".join(", ".join(form) for form in forms)
    return f"lacks a column: rows of {method} have {wanted}", ()
