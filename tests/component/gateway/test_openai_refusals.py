"""Refusals as typed exceptions of the `openai` package."""

from __future__ import annotations

import httpx
import openai
import pytest

from gateway.owners.auth.keys import NewKey
from tandem.errors import Overloaded, SequenceTooLong, TokenOutOfVocabulary
from tests.support.gateway.running import KEY
from tests.support.gateway.speaking_models import (
    byte_tokenizer,
    chat,
    client_of,
    complete,
    says,
    speaking_gateway,
    write_speaking_model,
)
from tests.support.waiting import wait_until


@pytest.fixture(scope="module")
def gate(tmp_path_factory):
    folder = tmp_path_factory.mktemp("refusals")
    with speaking_gateway(
        folder, session_ttl=600, max_payload_bytes=2**20, openai={"max_choices": 8}
    ) as gate:
        mute = write_speaking_model(folder / "mute", byte_tokenizer(), template=None)
        gate.run(gate.gateway.models.add(name="untemplated", path=str(mute)))
        complete(client_of(gate))  # starts the engine
        yield gate


@pytest.fixture
def client(gate):
    with client_of(gate) as client:
        yield client


def refusal(kind, call, *arguments, **changes):
    with pytest.raises(kind) as caught:
        call(*arguments, **changes)
    return caught.value


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("presence_penalty", 2.5),
        ("frequency_penalty", -3),
        ("repetition_penalty", 1.1),
        ("logit_bias", {"1": 5}),
        ("min_p", 1.5),
        ("suffix", "end"),
        ("best_of", 3),
        ("use_beam_search", True),
        ("prompt_logprobs", 1),
        ("chat_template", "{{ 1 }}"),
        ("truncate_prompt_tokens", 5),
        ("no_such_field", 1),
        ("temperature", -1),
        ("top_p", 0),
        ("n", 0),
        ("max_tokens", 0),
        ("stop", ["a", ""]),
        ("stop_token_ids", [-1]),
        ("stream_options", {"include_usage": True}),
        ("guided_choice", [1]),
        ("guided_grammar", ["start"]),
        ("response_format", {"type": "grammar"}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_field_that_is_wrong_or_not_offered_is_named(client, field, value, stream):
    if field == "stream_options" and stream:
        return
    error = refusal(
        openai.BadRequestError, complete, client, stream=stream, extra_body={field: value}
    )
    assert error.param == field
    assert (error.type, error.code) == ("invalid_request_error", "invalid_request")
    assert field in error.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"messages": []}, "messages"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
    ],
)
def test_a_field_of_a_chat_is_named_too(client, fields, param):
    error = refusal(openai.BadRequestError, chat, client, extra_body=fields)
    assert error.param == param


@pytest.mark.parametrize(
    "fields",
    [
        {"user": "me", "metadata": {"a": "b"}, "store": False, "seed": None},
        {"presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": None, "best_of": 1},
        {"service_tier": "auto", "prompt_cache_key": "k", "min_p": 0.0, "suffix": None},
        {"parallel_tool_calls": False},
        {"parallel_tool_calls": True},
    ],
)
def test_fields_that_change_nothing_are_accepted(client, fields):
    assert complete(client, extra_body=fields).choices


@pytest.mark.parametrize(
    "fields",
    [
        {"reasoning_effort": "none", "verbosity": "medium"},
        {"reasoning_effort": None, "tools": [], "tool_choice": "auto"},
        {"modalities": ["text"], "function_call": "auto"},
    ],
)
def test_what_agents_send_by_default_is_accepted(client, fields):
    assert chat(client, extra_body=fields).choices


def test_echo_with_logprobs_cannot_be_streamed(client):
    error = refusal(openai.BadRequestError, complete, client, echo=True, logprobs=1, stream=True)
    assert error.param == "stream"


def test_a_request_has_a_largest_number_of_choices(client):
    error = refusal(openai.BadRequestError, complete, client, prompt=["a", "b", "c"], n=3)
    assert (error.param, "8 at most" in error.message) == ("n", True)


def test_a_wrong_key_is_an_authentication_error(gate):
    for key in ("tml-wrong", "x"):
        error = refusal(openai.AuthenticationError, complete, client_of(gate, key=key))
        assert (error.type, error.code) == ("authentication_error", "invalid_api_key")
    with httpx.Client(base_url=gate.url, timeout=30) as nobody:
        for headers in ({}, {"Authorization": f"Basic {KEY}"}, {"Authorization": "Bearer"}):
            assert nobody.get("/v1/models", headers=headers).status_code == 401
        assert nobody.get("/v1/models", headers={"X-API-Key": KEY}).status_code == 200


def test_a_reader_can_list_models_and_not_sample(gate):
    _, key = gate.run(gate.gateway.keys.create(NewKey(owner="ann", role="reader")))
    reader = client_of(gate, key=key)
    assert [m.id for m in reader.models.list()]
    assert refusal(openai.PermissionDeniedError, complete, reader).type == "permission_error"


@pytest.mark.parametrize(
    "model", ["huge", "tinker://s-0123456789ab:train:0/sampler_weights/x", "s-012345abcdef:train:0"]
)
def test_an_unknown_model_is_not_found(client, model):
    for error in (
        refusal(openai.NotFoundError, complete, client, model=model),
        refusal(openai.NotFoundError, complete, client, model=model, stream=True),
        refusal(openai.NotFoundError, client.models.retrieve, model),
    ):
        assert (error.param, error.code) == ("model", "model_not_found")


def test_a_malformed_path_is_a_bad_request(client):
    refusal(openai.BadRequestError, complete, client, model="tinker://../etc")


def test_a_model_without_a_chat_template_is_refused_with_advice(client):
    error = refusal(openai.BadRequestError, chat, client, model="untemplated")
    assert "chat_template.jinja" in error.message
    assert "/v1/completions" in error.message


def test_a_model_without_a_tokenizer_is_refused_with_advice(client):
    error = refusal(openai.BadRequestError, complete, client, model="tiny")
    assert "tokenizer.json" in error.message


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("raised", "kind", "code"),
    [
        (SequenceTooLong("too long"), openai.BadRequestError, "context_length_exceeded"),
        (TokenOutOfVocabulary("no token"), openai.BadRequestError, "token_out_of_vocabulary"),
        (Overloaded("full", retry_after=3), openai.RateLimitError, "rate_limit_exceeded"),
    ],
)
def test_a_refusal_by_the_engine_is_an_ordinary_error(gate, client, stream, raised, kind, code):
    engine = says(gate, "ok")
    engine.sample_error = raised
    error = refusal(kind, complete, client, stream=stream)
    assert (error.code, raised.message in error.message) == (code, True)
    if kind is openai.RateLimitError:
        assert int(error.response.headers["retry-after"]) >= 1
    engine.sample_error = None


def test_a_prompt_that_cannot_fit_is_refused_without_encoding_it(client):
    error = refusal(openai.BadRequestError, complete, client, prompt="x" * 20_000)
    assert error.code == "context_length_exceeded"


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_without_room_for_its_answer_is_refused_with_the_numbers(client, stream):
    sentence = (
        "Prompt length plus max_tokens exceeds the model's context window: 60 prompt tokens + "
        "5 max_tokens > 64."
    )
    error = refusal(
        openai.BadRequestError, complete, client, prompt="x" * 60, max_tokens=5, stream=stream
    )
    assert (error.code, sentence in error.message) == ("context_length_exceeded", True)
    chats = [{"role": "user", "content": "x" * 80}]
    error = refusal(openai.BadRequestError, chat, client, messages=chats, stream=stream)
    assert "+ 1 max_tokens > 64" in error.message


def test_a_text_that_fills_the_context_is_scored_by_an_echo(client):
    choice = complete(client, prompt="x" * 64, echo=True, logprobs=0, max_tokens=0).choices[0]
    assert (len(choice.text), len(choice.logprobs.tokens), choice.finish_reason) == (
        64,
        64,
        "length",
    )
    assert complete(client, prompt="x" * 64, echo=True, max_tokens=0).choices[0].text == "x" * 64
    error = refusal(openai.BadRequestError, complete, client, prompt="x" * 64, echo=True)
    assert "64 prompt tokens + 16 max_tokens > 64" in error.message


def test_a_body_that_is_too_large_or_not_json(gate):
    with gate.http() as http:
        large = http.post("/v1/completions", content=b"x" * (2**20 + 1))
        assert (large.status_code, large.json()["error"]["code"]) == (413, "payload_too_large")
        for content in (b"", b"[", b"3", b'{"model": 3}', b"model=x"):
            answer = http.post("/v1/chat/completions", content=content)
            is_json = content in (b"3", b'{"model": 3}')
            advised = "send JSON with Content-Type: application/json" in answer.text
            assert advised is not is_json, answer.text
            assert (answer.status_code, answer.json()["error"]["type"]) == (
                400,
                "invalid_request_error",
            )


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded"])
def test_a_body_of_another_type_is_told_which_to_send(gate, kind):
    content = b'{"model": "speaker", "prompt": "x"}'
    with gate.http() as http:
        for path in ("/v1/completions", "/api/v1/create_session"):
            answer = http.post(path, content=content, headers={"Content-Type": kind})
            assert answer.status_code == 400
            assert f"of the type '{kind}'; send JSON with Content-Type" in answer.text
        good = ("application/json; charset=utf-8", "Application/JSON", "application/x+json", "")
        for other in good:
            headers = {"Content-Type": other} if other else {}
            answer = http.post("/v1/completions", content=content, headers=headers)
            assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("path", ["responses", "embeddings", "audio/speech"])
def test_a_route_that_is_not_there_is_answered_with_those_that_are(gate, path):
    with gate.http() as http:
        answer = http.post(f"/v1/{path}", json={"model": "speaker", "input": "x"})
    assert answer.status_code == 404
    message = answer.json()["error"]["message"]
    assert "this server has /v1/chat/completions, /v1/completions, /v1/models" in message


@pytest.mark.parametrize(
    ("sent", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/chat/completions", "/v1/chat/completions"),
        ("/api/v1/chat/completions", "/v1/chat/completions"),
        ("/v1/asample", "/api/v1/asample"),
        ("/create_session", "/api/v1/create_session"),
    ],
)
def test_a_wrong_base_address_is_told_the_right_path(gate, sent, meant):
    with gate.http() as http:
        answer = http.post(sent, json={})
        assert (answer.status_code, f"; {meant} is there" in answer.text) == (404, True), (
            answer.text
        )
        unknown = http.post("/nothing/like/it", json={}).json()["error"]
        assert unknown == "this server does not answer POST /nothing/like/it"


def test_an_unknown_path_or_method_is_answered_in_the_same_form(gate):
    with gate.http() as http:
        for method, path, status in (
            ("GET", "/v1/embeddings", 404),
            ("GET", "/v1/completions", 405),
        ):
            answer = http.request(method, path)
            assert answer.status_code == status
            assert answer.json()["error"]["code"] == "unknown_endpoint"


def test_an_engine_that_starts_slowly_is_worth_a_retry(gate, monkeypatch):
    _, key = gate.run(gate.gateway.keys.create(NewKey(owner="slow", role="member")))
    gate.run(gate.launcher.start_gate.clear)
    try:
        with monkeypatch.context() as impatient:
            impatient.setattr("gateway.api.openai.service.START_TIMEOUT", 0.5)
            error = refusal(openai.InternalServerError, complete, client_of(gate, key=key))
        assert (error.status_code, error.code) == (503, "engine_starting")
        assert "the sampler is starting" in error.message
        assert int(error.response.headers["retry-after"]) > 0
    finally:
        gate.run(gate.launcher.start_gate.set)
    assert complete(client_of(gate, key=key)).choices, "the start went on"


def test_an_engine_that_cannot_start_says_why(gate):
    _, key = gate.run(gate.gateway.keys.create(NewKey(owner="unlucky", role="member")))
    gate.launcher.start_error["sampler"] = "no device is free"
    try:
        error = refusal(openai.InternalServerError, complete, client_of(gate, key=key))
        assert (error.status_code, "no device is free" in error.message) == (503, True)
    finally:
        gate.launcher.start_error.clear()


def test_an_engine_that_dies_in_a_stream_ends_it_with_an_error(gate):
    _, key = gate.run(gate.gateway.keys.create(NewKey(owner="victim", role="member")))
    client = client_of(gate, key=key)
    complete(client)  # starts an engine, the newest from now on
    engine = says(gate, "abc")
    worker_id = next(w for w, s in gate.launcher.servicers.items() if s is engine)
    gate.run(engine.gate.clear)
    stream = complete(client, stream=True)
    next(stream)
    gate.run(gate.launcher.kill(worker_id, "killed by the test"))
    error = refusal(openai.APIError, list, stream)
    assert "died during this sample" in error.message
    wait_until(lambda: not any(s.waiting for s in gate.gateway.samplers.all()))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("token", [-1, 2**31, 2**40])
def test_a_number_that_is_not_a_token_id_is_refused(client, token, stream):
    error = refusal(openai.BadRequestError, complete, client, prompt=[1, token], stream=stream)
    assert error.code == "token_out_of_vocabulary"


def test_numbers_of_any_size_in_a_schema_reach_the_engine(gate):
    _, key = gate.run(gate.gateway.keys.create(NewKey(owner="large", role="member")))
    client = client_of(gate, key=key)
    complete(client, extra_body={"guided_json": {"maximum": 10**30}})
    # The newest engine may be another one: an engine killed by an earlier test restarts meanwhile.
    engines = [e for name, e in gate.launcher.servicers.items() if name.startswith("sampler")]
    asked = [request.structured.json_schema for e in engines for request in e.requests]
    assert f'{{"maximum": {10**30}}}' in asked
