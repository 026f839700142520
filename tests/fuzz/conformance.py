"""Whether an answer is one that its route declares."""

from __future__ import annotations

from pydantic import TypeAdapter, ValidationError

from gateway.api.fields import Refusal
from gateway.api.routing import PathOperation

LONGEST_REFUSAL = 16 * 2**10
"""Bytes: a refusal does not repeat what was sent."""


def check_answer(operation: PathOperation, *, status: int, media: str, body: bytes) -> None:
    """Raises `AssertionError` with a sentence."""
    where = f"{operation.method} {operation.path} answered {status}"
    assert status < 500, f"{where}: {body[:500]!r}"
    expected = status == operation.status_code
    declared = operation.responses.get(status)
    if declared is None and status in (404, 431):  # of the router and of the connection
        declared = operation.responses.get(401, {"model": Refusal})
    assert expected or declared is not None, f"{where}, which is not declared"
    if status >= 400:
        assert len(body) <= LONGEST_REFUSAL, f"{where} with {len(body)} bytes"
    content = (declared or {}).get("content", {})
    model = (declared or {}).get("model") or (operation.response_model if expected else None)
    if media in content:
        return
    if model is None:
        assert not body, f"{where} with a body: {body[:200]!r}"
        return
    assert media == "application/json", f"{where} as {media!r}"
    try:
        TypeAdapter(model).validate_json(body, strict=True)
    except ValidationError as error:
        raise AssertionError(f"{where} with {body[:400]!r}: {error}") from error
