"""`tandem chat` through the OpenAI routes, with a fake sampler."""

from __future__ import annotations

import builtins
import json
from functools import partial

import pytest

from tandem.cli import chat
from tandem.errors import InvalidRequest, UnknownModel
from tests.support.gateway.speaking_models import client_of, says, speaking_gateway


@pytest.fixture(scope="module")
def gate(tmp_path_factory):
    with speaking_gateway(tmp_path_factory.mktemp("chat"), session_ttl=600) as gate:
        client_of(gate).completions.create(model="speaker", prompt="x")  # starts the engine
        yield gate


@pytest.fixture
def tandem(tandem):
    return partial(tandem, "chat")


def test_one_message_is_answered(gate, tandem):
    says(gate, "five")
    assert tandem("speaker", "2 and 3?") == "five\n"
    assert tandem("speaker", text="2 and 3?\n") == "five\n", "through a pipe"
    assert tandem("speaker", "2 and 3?", "--complete") == "five\n"


def test_two_models_answer_side_by_side_and_as_json(gate, tandem):
    says(gate, "five")
    said = tandem("speaker", "x", "--compare", "speaker")
    assert said == "── speaker ──\nfive\n── speaker ──\nfive\n"
    answers = json.loads(tandem("speaker", "x", "--compare", "speaker", "--json"))["answers"]
    assert [each["text"] for each in answers] == ["five", "five"]
    assert answers[0]["weight_version"] and answers[0]["finish_reason"] == "stop"


def test_sampling_fields_and_the_system_message_reach_the_engine(gate, tandem):
    engine = says(gate, "ok")
    tandem("speaker", "hi", "--system", "be kind", "--max-tokens", "7", "--temperature", "0")
    asked = engine.requests[-1]
    assert (asked.params.max_tokens, asked.params.temperature) == (7, 0.0)


def test_an_answer_cannot_move_the_cursor_and_a_cut_one_is_marked(gate, tandem):
    says(gate, "a\x1b[2Jb")
    assert tandem("speaker", "x") == "a�[2Jb\n"


def test_a_conversation_remembers_and_begins_again(gate, tandem, monkeypatch):
    says(gate, "five")
    asked = []
    lines = iter(["one", "two", "/new", "three"])

    def ask(prompt):
        if (line := next(lines, None)) is None:
            raise EOFError
        return line

    parts = chat._parts

    def noted(target, path, body):
        asked.append([message["content"] for message in body["messages"]])
        return parts(target, path, body)

    monkeypatch.setattr(builtins, "input", ask)
    monkeypatch.setattr(chat, "_parts", noted)
    monkeypatch.setattr(chat, "_is_conversation", lambda: True)
    assert tandem("speaker").count("five") == 3
    assert asked == [["one"], ["one", "five", "two"], ["three"]]


def test_mistakes_are_explained(gate, tandem, monkeypatch):
    with pytest.raises(UnknownModel, match="no base model or run is called 'speeker'; base"):
        tandem("speeker", "x")
    with pytest.raises(InvalidRequest, match="tokenizer"):
        tandem("tiny", "x")
    with pytest.raises(ValueError, match="the prompt is empty"):
        tandem("speaker", text=" ")
