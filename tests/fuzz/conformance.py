"""Whether an answer is one that the description of its route has."""

from __future__ import annotations

from pydantic import BaseModel, TypeAdapter, ValidationError

from gateway.api.description.base import Answer, Binary
from gateway.api.description.document import Operation

LONGEST_REFUSAL = 16 * 2**10
"""Bytes: a refusal does not repeat what was sent."""


def check_answer(operation: Operation, *, status: int, media: str, body: bytes) -> None:
    """Raises `AssertionError` with a sentence."""
    where = f"{operation.method} {operation.path} answered {status}"
    assert status < 500, f"{where}: {body[:500]!r}"
    answer = operation.described.answers.get(status, Answer(contents=()))
    refused = status in operation.refusals or status in (404, 431)
    assert refused or status in operation.described.answers, f"{where}, which is not described"
    if status >= 400:
        assert len(body) <= LONGEST_REFUSAL, f"{where} with {len(body)} bytes"
    binaries = [each for each in answer.contents if isinstance(each, Binary)]
    if any(media == each.media for each in binaries if each.media != "application/json"):
        return
    models: list[type[BaseModel]] = [e for e in answer.contents if not isinstance(e, Binary)]
    if refused:
        models.append(operation.refusal)
    if not models and not binaries:
        assert not body, f"{where} with a body: {body[:200]!r}"
        return
    assert media == "application/json", f"{where} as {media!r}"
    if any(each.media == "application/json" for each in binaries):
        return
    problems = [_problem(model, body) for model in models]
    assert None in problems, f"{where} with {body[:400]!r}: {problems}"


def _problem(model: type[BaseModel], body: bytes) -> str | None:
    try:
        TypeAdapter(model).validate_json(body, strict=True)
    except ValidationError as error:
        return f"{model.__name__}: {error.errors(include_url=False)[0]}"
    return None
