"""The page for messages to models, with a fake engine."""

from __future__ import annotations

import asyncio
import html
import json
import re

import httpx
import pytest

from gateway.api.openai.tokenizer import ModelTokenizer
from gateway.owners.auth.keys import NewKey
from tandem.errors import UnsupportedInput
from tests.support.gateway.running import KEY
from tests.support.gateway.speaking_models import (
    byte_tokenizer,
    client_of,
    says,
    speaking_gateway,
)
from tests.support.waiting import until, wait_until

HOSTILE = '<img src=x onerror="a">'


@pytest.fixture(scope="module")
def gate(tmp_path_factory):
    with speaking_gateway(tmp_path_factory.mktemp("chat"), session_ttl=600) as gate:
        client_of(gate).completions.create(model="speaker", prompt="x")  # starts the engine
        yield gate


@pytest.fixture
def browser(gate):
    with httpx.Client(
        base_url=gate.url, headers={"Accept": "text/html"}, timeout=60, verify=False
    ) as client:
        token = re.search(r'name="form_token" value="(\w+)"', client.get("/sign-in").text)[1]
        client.post("/sign-in", data={"form_token": token, "key": KEY})
        yield client


def refuse(_tokenizer):
    raise UnsupportedInput("the model has no chat template")


def fields_of(text):
    found = re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)"', text)
    return {name: html.unescape(value) for name, value in found}


def test_a_message_is_answered_without_a_script_and_the_talk_goes_on(gate, browser):
    engine = says(gate, "hello back")
    fields = fields_of(browser.get("/chat?model=speaker").text)
    ask = {**fields, "model": "speaker", "message": "hi", "temperature": "0.5", "max_tokens": "50"}
    shown = browser.post("/chat", data=ask)
    assert shown.status_code == 200
    assert "hello back" in shown.text
    assert engine.requests[-1].params.temperature == 0.5
    history = json.loads(fields_of(shown.text)["history1"])
    assert [turn["content"] for turn in history] == ["hi", "hello back"]
    again = {**fields_of(shown.text), "model": "speaker", "message": "and now?"}
    assert "and now?" in browser.post("/chat", data=again).text
    prompt = engine.requests[-1].prompt_tokens
    said = byte_tokenizer().decode(memoryview(prompt).cast("i").tolist(), skip_special_tokens=False)
    assert (
        said
        == "<|user|>hi<eos>\n<|assistant|>hello back<eos>\n<|user|>and now?<eos>\n<|assistant|>"
    )


def test_answers_of_models_stay_text(gate, browser):
    says(gate, HOSTILE)
    fields = fields_of(browser.get("/chat?model=speaker").text)
    ask = {**fields, "model": "speaker", "message": HOSTILE}
    shown = browser.post("/chat", data=ask).text
    assert "<img src=x" not in shown
    assert "&lt;img src=x" in re.search(r'class="turn user".*?</article>', shown, re.DOTALL)[0]
    answer = re.search(r'class="turn assistant".*?</article>', shown, re.DOTALL)[0]
    assert "&lt;img src=x onerror=&#34;a&#34;&gt;" in answer


def test_two_models_answer_side_by_side_and_one_refusal_spoils_nothing(gate, browser):
    says(gate, "hello")
    fields = fields_of(browser.get("/chat").text)
    ask = {**fields, "model": "speaker", "model2": "tiny", "message": "hi"}
    shown = browser.post("/chat", data=ask).text
    assert shown.count('class="side card"') == 2
    assert "hello" in shown
    assert "The model &#39;tiny&#39; has no tokenizer.json" in shown


async def test_a_client_that_leaves_ends_the_answers_of_both_models(gate):
    engine = says(gate, "abc")
    gate.run(engine.gate.clear)
    before, sent = len(engine.cancelled), len(engine.requests)
    ask = {"model": "speaker", "model2": "speaker", "message": "hi"}
    headers = {"X-API-Key": KEY}
    async with httpx.AsyncClient(base_url=gate.url, headers=headers, verify=False) as client:
        asking = asyncio.create_task(client.post("/chat", data=ask))
        await until(lambda: len(engine.requests) == sent + 2)
        asking.cancel()
        await until(lambda: len(engine.cancelled) == before + 2)
    gate.run(engine.gate.set)


def test_an_answer_is_streamed_with_its_tokens(gate, browser):
    says(gate, "hello")
    fields = fields_of(browser.get("/chat?model=speaker").text)
    ask = {**fields, "model": "speaker", "message": "hi", "side": "1"}
    with browser.stream("POST", "/chat/stream", data=ask) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    events = [json.loads(line) for line in lines[:-1]]
    assert "".join(event["text"] for event in events) == "hello"
    tokens = [token for event in events for token in event["tokens"]]
    assert "".join(text for text, _, _ in tokens).startswith("hello")
    assert all(logprob <= 0 for _, logprob, _ in tokens)


@pytest.mark.parametrize("asked", [True, False])
def test_plain_text_is_for_those_who_ask_and_for_models_without_a_chat_template(
    gate, browser, monkeypatch, asked
):
    engine = says(gate, "and so on")
    fields = fields_of(browser.get("/chat").text)
    ask = {**fields, "model": "speaker", "message": "Once", "top_k": "3"}
    if asked:
        ask["mode"] = "text"
    else:
        monkeypatch.setattr(ModelTokenizer, "chat_template", refuse)
    assert "and so on" in browser.post("/chat", data=ask).text
    request = engine.requests[-1]
    prompt = memoryview(request.prompt_tokens).cast("i").tolist()
    assert (byte_tokenizer().decode(prompt), request.params.top_k) == ("Once", 3)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"message": " "}, "The message is empty; write one."),
        ({"temperature": "-1"}, "greater than or equal to 0"),
        ({"model": "nowhere"}, "nowhere"),
    ],
)
def test_a_wrong_entry_is_named_beside_the_message(gate, browser, changes, sentence):
    fields = fields_of(browser.get("/chat").text)
    shown = browser.post("/chat", data={**fields, "model": "speaker", "message": "x", **changes})
    assert shown.status_code == 200
    assert sentence in html.unescape(shown.text)


def test_a_damaged_history_and_a_foreign_form_are_refused(gate, browser):
    fields = fields_of(browser.get("/chat").text)
    ask = {**fields, "model": "speaker", "message": "x"}
    assert browser.post("/chat", data={**ask, "history1": "[1]"}).status_code == 400
    assert browser.post("/chat", data={**ask, "form_token": "0"}).status_code == 400


@pytest.mark.parametrize(
    ("history", "status", "sentence"),
    [
        ([{"role": "user", "content": "x"}] * 201, 400, "201 turns, 200 at most"),
        ([0] * 70_000, 413, "JSON values"),
    ],
)
def test_a_conversation_is_bounded(gate, browser, history, status, sentence):
    fields = fields_of(browser.get("/chat").text)
    ask = {**fields, "model": "speaker", "message": "x", "history1": json.dumps(history)}
    refused = browser.post("/chat", data=ask)
    assert (refused.status_code, sentence in refused.text) == (status, True)


def test_a_reader_sees_no_form_and_may_not_sample(gate):
    key = gate.run(gate.gateway.keys.create(NewKey(owner="ann", role="reader")))[1]
    with gate.http(key) as client:
        shown = client.get("/chat", headers={"Accept": "text/html"})
        assert "may only read" in shown.text
        assert client.post("/chat", data={"model": "speaker", "message": "x"}).status_code == 403


def test_the_session_of_a_chat_ends_by_itself(tmp_path):
    with (
        speaking_gateway(tmp_path, session_ttl=600, openai_idle_ttl=0.5) as gate,
        gate.http() as client,
    ):
        ask = {"model": "speaker", "message": "hi"}
        assert client.post("/chat", data=ask).status_code == 200
        wait_until(lambda: not gate.gateway.sessions.all())
