"""The OpenAI-compatible routes, with the `openai` package and a fake sampler."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import openai
import pytest

from tests.support.gateway.raw_connection import Raw
from tests.support.gateway.running import KEY
from tests.support.gateway.speaking_models import (
    CHAT,
    async_client_of,
    byte_tokenizer,
    chat,
    client_of,
    complete,
    says,
    speaking_gateway,
)
from tests.support.waiting import until, wait_until

TOKENIZER = byte_tokenizer()
END = TOKENIZER.token_to_id("<eos>")


def ids(text):
    return TOKENIZER.encode(text, add_special_tokens=False).ids


@pytest.fixture(scope="module")
def gate(tmp_path_factory):
    with speaking_gateway(tmp_path_factory.mktemp("openai"), session_ttl=600) as gate:
        client_of(gate).completions.create(model="speaker", prompt="x")  # starts the engine
        yield gate


@pytest.fixture
def client(gate):
    with client_of(gate) as client:
        yield client


def test_a_base_url_may_end_with_a_slash(gate):
    for slashes in ("/", "//"):
        with openai.OpenAI(base_url=f"{gate.url}{slashes}/v1", api_key=KEY, max_retries=0) as one:
            assert one.models.list().data
    with gate.http() as http:
        assert http.get(f"{gate.url}//api/v1/healthz").json() == {"status": "ok"}
        assert http.get(f"{gate.url}//nowhere").status_code == 404


# --- Requests to the engine ----------------------------------------------------------------


def test_all_fields_reach_the_engine(gate, client):
    engine = says(gate, "ok")
    complete(
        client,
        max_tokens=7,
        temperature=0.5,
        top_p=0.25,
        n=2,
        seed=-3,
        stop=["a", "b"],
        logprobs=4,
        user="me",
        presence_penalty=-1.5,
        frequency_penalty=2,
        logit_bias={},
        extra_body={"top_k": 9, "stop_token_ids": [5], "min_p": 0.125},
    )
    request = engine.requests[-1]
    params = request.params
    assert np.frombuffer(request.prompt_tokens, "<i4").tolist() == ids("x")
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (7, 0.5, 0.25, 9)
    assert (params.min_p, params.presence_penalty, params.frequency_penalty) == (0.125, -1.5, 2)
    assert (request.num_samples, params.seed, request.topk_sample_logprobs) == (2, -3, 4)
    assert (params.stop_given, list(params.stop_strings)) == (True, ["a", "b"])
    assert list(params.stop_token_ids) == [5, END], "stops are beside the end tokens"


def test_the_defaults_are_those_of_openai(gate, client):
    engine = says(gate, "ok")
    complete(client)
    params = engine.requests[-1].params
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (16, 1, 1, -1)
    assert (params.min_p, params.presence_penalty, params.frequency_penalty) == (0, 0, 0)
    assert not params.HasField("seed")
    chat(client)
    assert not engine.requests[-1].params.HasField("max_tokens"), "as many as fit"
    chat(client, max_completion_tokens=3)
    assert engine.requests[-1].params.max_tokens == 3
    complete(client, extra_body={"ignore_eos": True})
    assert not engine.requests[-1].params.stop_token_ids


@pytest.mark.parametrize(
    ("fields", "form", "value"),
    [
        ({"guided_regex": "a+"}, "regex", "a+"),
        ({"guided_json": {"type": "object"}}, "json_schema", '{"type": "object"}'),
        (
            {"structured_outputs": {"json": '{"type": "object"}'}},
            "json_schema",
            '{"type": "object"}',
        ),
        ({"structured_outputs": {"regex": "b"}}, "regex", "b"),
        ({"guided_grammar": 'start: "a"'}, "lark", 'start: "a"'),
        ({"structured_outputs": {"grammar": 'start: "b"'}}, "lark", 'start: "b"'),
        ({"response_format": {"type": "json_object"}}, "json_object", True),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": {}},
                }
            },
            "json_schema",
            "{}",
        ),
    ],
)
def test_structured_output_by_any_of_its_names(gate, client, fields, form, value):
    engine = says(gate, "ok")
    chat(client, extra_body=fields)
    structured = engine.requests[-1].structured
    assert structured.WhichOneof("form") == form
    assert getattr(structured, form) == value


@pytest.mark.parametrize("field", ["guided_choice", "structured_outputs"])
def test_structured_output_as_one_of_several_choices(gate, client, field):
    engine = says(gate, "ok")
    value = ["yes", "no"] if field == "guided_choice" else {"choice": ["yes", "no"]}
    complete(client, extra_body={field: value})
    assert list(engine.requests[-1].structured.choice.choices) == ["yes", "no"]
    complete(client, extra_body={"response_format": {"type": "text"}})
    assert not engine.requests[-1].HasField("structured")


def test_a_chat_is_rendered_with_the_models_template(gate, client):
    engine = says(gate, "ok")
    chat(client, messages=[{"role": "system", "content": "s"}, *CHAT])
    expected = "<|system|>s<eos>\n<|user|>hi<eos>\n<|assistant|>"
    assert np.frombuffer(engine.requests[-1].prompt_tokens, "<i4").tolist() == ids(expected)
    chat(
        client,
        messages=[*CHAT, {"role": "assistant", "content": "Well"}],
        extra_body={"continue_final_message": True, "add_generation_prompt": False},
    )
    expected = "<|user|>hi<eos>\n<|assistant|>Well"
    assert np.frombuffer(engine.requests[-1].prompt_tokens, "<i4").tolist() == ids(expected)


# --- Responses -----------------------------------------------------------------------------


def test_a_completion(gate, client):
    says(gate, "the €")
    raw = client.completions.with_raw_response.create(model="speaker", prompt="x")
    answer = raw.parse()
    assert raw.headers["X-Tandem-Weight-Version"] == "base/speaker"
    assert (answer.object, answer.model) == ("text_completion", "speaker")
    assert answer.id.startswith("cmpl-")
    assert answer.tandem_weight_version == "base/speaker"
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason, choice.index) == ("the €", "stop", 0)
    assert choice.logprobs is None
    usage = answer.usage
    sampled = len(ids("the €")) + 1
    assert (usage.prompt_tokens, usage.completion_tokens) == (1, sampled)
    assert usage.total_tokens == 1 + sampled
    assert usage.prompt_tokens_details.cached_tokens == 1


def test_a_chat_completion(gate, client):
    says(gate, "the €")
    answer = chat(client, n=2)
    assert (answer.object, answer.id[:9]) == ("chat.completion", "chatcmpl-")
    assert [c.index for c in answer.choices] == [0, 1]
    message = answer.choices[1].message
    assert (message.role, message.content, message.refusal) == ("assistant", "the €", None)
    assert answer.choices[0].finish_reason == "stop"


def test_several_prompts_in_every_form(gate, client):
    engine = says(gate, "ok")
    engine.speak = lambda prompt: [*prompt[::-1], END]
    for prompt in (["ab", "cd"], [ids("ab"), ids("cd")]):
        answer = complete(client, prompt=prompt, n=2)
        assert [c.text for c in answer.choices] == ["ba", "ba", "dc", "dc"]
        assert [c.index for c in answer.choices] == [0, 1, 2, 3]
        assert answer.usage.prompt_tokens == 4
    assert complete(client, prompt=ids("ab")).choices[0].text == "ba"


def test_a_stop_string_is_not_in_the_text_and_its_tokens_are_in_the_tokens(gate, client):
    says(gate, "one STOP", end=False)
    body = {"return_token_ids": True}
    choice = complete(client, stop=" STOP", logprobs=0, extra_body=body).choices[0]
    assert (choice.text, choice.finish_reason) == ("one", "stop")
    assert choice.token_ids == ids("one STOP")
    assert choice.prompt_token_ids == ids("x")
    assert "".join(choice.logprobs.tokens) == "one STOP"
    assert choice.logprobs.text_offset == [0, 1, 2, 3, 3, 3, 3, 3]
    body["include_stop_str_in_output"] = True
    assert complete(client, stop=" STOP", extra_body=body).choices[0].text == "one STOP"


def test_a_stop_token_is_no_text(gate, client):
    says(gate, "ab!", end=False)
    body = {"stop_token_ids": ids("!"), "return_token_ids": True}
    answer = chat(client, extra_body=body)
    assert answer.choices[0].message.content == "ab"
    assert answer.choices[0].token_ids == ids("ab!")
    assert answer.prompt_token_ids == ids("<|user|>hi<eos>\n<|assistant|>")


def test_logprobs_of_a_completion(gate, client):
    says(gate, "the €")
    found = complete(client, logprobs=2).choices[0].logprobs
    assert found.tokens == ["the", " ", "bytes:\\xe2\\x82", "bytes:\\xac", "<eos>"]
    assert found.token_logprobs == [0, -1, -2, -3, -4]
    assert found.text_offset == [0, 3, 4, 4, 5]
    others = [TOKENIZER.decode([0]), TOKENIZER.decode([1])]
    assert found.top_logprobs[0] == {others[0]: 0, others[1]: -1, "the": 0}
    by_id = complete(client, logprobs=1, extra_body={"return_tokens_as_token_ids": True})
    assert by_id.choices[0].logprobs.tokens == [f"token_id:{t}" for t in [*ids("the €"), END]]


def test_logprobs_of_a_chat(gate, client):
    says(gate, "€")
    content = chat(client, logprobs=True, top_logprobs=1).choices[0].logprobs.content
    assert [bytes(entry.bytes) for entry in content] == [b"\xe2\x82", b"\xac", b"<eos>"]
    assert [entry.logprob for entry in content] == [0, -1, -2]
    assert [len(entry.top_logprobs) for entry in content] == [1, 1, 1]
    assert chat(client).choices[0].logprobs is None


def test_an_echo_has_the_prompts_logprobs(gate, client):
    engine = says(gate, "!")
    choice = complete(client, prompt="the a", echo=True, logprobs=1).choices[0]
    assert engine.requests[-1].prompt_logprobs
    assert choice.text == "the a!"
    assert choice.logprobs.tokens == ["the", " ", "a", "!", "<eos>"]
    assert choice.logprobs.token_logprobs == [None, -1, -1, 0, -1]
    assert choice.logprobs.top_logprobs[0] is None
    assert choice.logprobs.text_offset == [0, 3, 4, 5, 6]


def test_an_echo_of_token_ids_says_where_each_is_in_its_text(gate, client):
    says(gate, "€!")
    prompt = ids("é<bos>the €")
    choice = complete(client, prompt=prompt, echo=True, logprobs=0).choices[0]
    assert choice.text == "é<bos>the €€!"
    assert choice.logprobs.text_offset == [0, 0, 1, 6, 9, 10, 10, 11, 11, 12, 13]


def test_rows_that_are_no_tokens_are_named_by_their_ids(gate, client):
    engine = says(gate, "a")
    speak, engine.speak = engine.speak, lambda _prompt: [300, *ids("a"), 301, END]
    found = complete(client, logprobs=0).choices[0]
    assert (found.text, found.logprobs.tokens[::2]) == ("a", ["token_id:300", "token_id:301"])
    assert found.logprobs.text_offset == [0, 0, 1, 1]
    entry = chat(client, logprobs=True).choices[0].logprobs.content[0]
    assert (entry.token, entry.bytes) == ("token_id:300", [])
    engine.speak = speak


def test_an_echo_without_new_tokens_scores_a_text(gate, client):
    says(gate, "never seen")
    answer = complete(client, prompt="ab", echo=True, logprobs=0, max_tokens=0)
    assert answer.choices[0].text == "ab"
    assert answer.choices[0].logprobs.token_logprobs == [None, -1]
    assert answer.usage.completion_tokens == 0


# --- Streams -------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["the € and 😀 the end STOP", "plain", "€"])
@pytest.mark.parametrize("n", [1, 3])
def test_a_streamed_completion_equals_the_whole_one(gate, client, text, n):
    says(gate, text, end="STOP" not in text)
    more = {"n": n, "logprobs": 2, "stop": ["STOP"], "extra_body": {"return_token_ids": True}}
    whole = complete(client, **more)
    parts = list(complete(client, stream=True, stream_options={"include_usage": True}, **more))
    assert {part.id for part in parts} == {parts[0].id}
    assert all(part.tandem_weight_version == "base/speaker" for part in parts)
    assert all(part.usage is None for part in parts[:-1])
    assert (parts[-1].choices, parts[-1].usage) == ([], whole.usage)
    for expected in whole.choices:
        mine = [c for p in parts for c in p.choices if c.index == expected.index]
        assert "".join(c.text for c in mine) == expected.text
        assert not any("�" in c.text for c in mine)
        assert [t for c in mine for t in c.token_ids] == expected.token_ids
        assert mine[0].prompt_token_ids == expected.prompt_token_ids
        assert [c.finish_reason for c in mine] == [None] * (len(mine) - 1) + ["stop"]
        for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
            told = [v for c in mine if c.logprobs for v in getattr(c.logprobs, name)]
            assert told == getattr(expected.logprobs, name)


def test_a_streamed_chat_equals_the_whole_one(gate, client):
    says(gate, "the € 😀")
    more = {"n": 2, "logprobs": True, "top_logprobs": 2}
    whole = chat(client, **more)
    parts = list(chat(client, stream=True, **more))
    for expected in whole.choices:
        mine = [c for p in parts for c in p.choices if c.index == expected.index]
        assert mine[0].delta.role == "assistant"
        assert "".join(c.delta.content or "" for c in mine) == expected.message.content
        assert mine[-1].finish_reason == "stop"
        told = [entry for c in mine if c.logprobs for entry in c.logprobs.content]
        assert told == expected.logprobs.content


def test_a_stream_sends_tokens_before_the_last_is_sampled(gate, client):
    engine = says(gate, "abc")
    gate.run(engine.gate.clear)
    stream = complete(client, stream=True)
    assert next(stream).choices[0].text == "a"
    gate.run(engine.gate.set)
    assert "".join(part.choices[0].text for part in stream) == "bc"


async def test_a_client_that_disconnects_cancels_its_sample(gate, client):
    engine = says(gate, "abc")
    gate.run(engine.gate.clear)
    before = len(engine.cancelled)
    stream = complete(client, stream=True)
    next(stream)
    stream.close()
    wait_until(lambda: len(engine.cancelled) == before + 1)
    sent = len(engine.requests)
    async with async_client_of(gate) as impatient:
        waiting = asyncio.create_task(impatient.completions.create(model="speaker", prompt="x"))
        await until(lambda: len(engine.requests) == sent + 1)
        waiting.cancel()
        await until(lambda: len(engine.cancelled) == before + 2)
    gate.run(engine.gate.set)
    wait_until(lambda: not any(s.waiting for s in gate.gateway.samplers.all()))


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_pipelines_and_disconnects_cancels_its_sample(gate, stream):
    engine = says(gate, "abc")
    gate.run(engine.gate.clear)
    before, sent = len(engine.cancelled), len(engine.requests)
    body = json.dumps({"model": "speaker", "prompt": "x", "stream": stream}).encode()
    with Raw(gate) as client:
        client.post("/v1/completions", f"Content-Length: {len(body)}")
        client.send(body + b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
        wait_until(lambda: len(engine.requests) == sent + 1)
        assert client.protocol_in(gate).pipeline
    wait_until(lambda: len(engine.cancelled) == before + 1)
    gate.run(engine.gate.set)


async def test_the_asynchronous_client_streams_many_at_once(gate):
    says(gate, "the €")
    async with async_client_of(gate) as client:

        async def one():
            stream = await client.chat.completions.create(
                model="speaker", messages=CHAT, stream=True
            )
            return "".join([part.choices[0].delta.content or "" async for part in stream])

        assert set(await asyncio.gather(*(one() for _ in range(20)))) == {"the €"}
