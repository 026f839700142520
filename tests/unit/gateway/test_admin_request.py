from __future__ import annotations

import errno
import io
import os
import sys

import orjson
import pytest
from pydantic import BaseModel, field_validator

from gateway.admin import request
from gateway.admin.request import answer_request
from tandem.errors import InvalidRequest


class Question(BaseModel):
    name: str

    @field_validator("name")
    @classmethod
    def _check(cls, name: str) -> str:
        if not name:
            raise ValueError("a name is needed")
        return name


@pytest.fixture
def ask(monkeypatch, capsysbinary):
    monkeypatch.setattr(request, "configure_logging", lambda **_: None)
    monkeypatch.setattr(os, "umask", lambda _mask: None)

    def ask(sent: object, error: Exception | None = None) -> tuple[int, dict]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(orjson.dumps(sent))))

        def answer(question: Question, _settings: object) -> dict[str, object]:
            if error is not None:
                raise error
            return {"hello": question.name}

        status = answer_request(Question, answer)
        return status, orjson.loads(capsysbinary.readouterr().out)

    return ask


def test_an_answer_is_written_as_json(ask):
    assert ask({"name": "ann"}) == (0, {"hello": "ann"})


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (InvalidRequest("no such key"), "no such key"),
        (FileNotFoundError(errno.ENOENT, "No such file", "/data"), "/data: No such file"),
        (OSError(errno.ENOSPC, "No space left"), "[Errno 28] No space left"),
    ],
)
def test_an_error_is_answered_with_its_sentence(ask, error, told):
    assert ask({"name": "ann"}, error) == (1, {"error": told})


@pytest.mark.parametrize(
    ("sent", "told"),
    [
        ({"name": ""}, "name: a name is needed"),
        ({}, "name: Field required"),
        ([], "request: Input should be an object"),
    ],
)
def test_a_wrong_field_of_a_request_is_named(ask, sent, told):
    assert ask(sent) == (1, {"error": told})
