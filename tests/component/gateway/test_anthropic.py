"""Anthropic's Messages API, through its client: with a trace and without one."""

from __future__ import annotations

import anthropic
import pytest

from gateway.api.openai.anthropic import MessagesRequest
from tests.support.gateway.running import KEY
from tests.support.gateway.speaking_models import says
from tests.support.gateway.traces import USER, Trace, agent_gateway, sampled_of, text_of

TOOL = {"name": "f", "description": "d", "input_schema": {"type": "object"}}


def client_of(base_url: str, **changes) -> anthropic.Anthropic:
    fields = {"api_key": KEY, "max_retries": 0, "timeout": 30} | changes
    return anthropic.Anthropic(base_url=base_url, **fields)


@pytest.fixture(scope="module")
def gate(tmp_path_factory):
    with agent_gateway(tmp_path_factory.mktemp("models")) as gate:
        yield gate


@pytest.fixture
def client(gate):
    return client_of(gate.url)


def say(client, *messages, **changes):
    fields = {"model": "agent", "max_tokens": 32, "messages": [*messages]}
    return client.messages.create(**(fields | changes))


def test_an_answer_has_blocks_usage_and_the_reason_of_its_end(gate, client):
    says(gate, "yo")
    answer = say(client, USER, system="Be kind.")
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", "agent")
    assert [(block.type, block.text) for block in answer.content] == [("text", "yo")]
    assert answer.stop_reason == "end_turn"
    assert answer.usage.output_tokens == 3
    assert answer.usage.input_tokens + answer.usage.cache_read_input_tokens > 10
    assert say(client, USER, max_tokens=1).stop_reason == "end_turn"


def test_a_stop_sequence_is_named(gate, client):
    says(gate, "one two")
    answer = say(client, USER, stop_sequences=["tw"])
    assert answer.content[0].text == "one "
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "tw")


def test_a_bearer_token_is_taken_too(gate):
    says(gate, "yo")
    client = client_of(gate.url, api_key=None, auth_token=KEY)
    assert say(client, USER).content[0].text == "yo"


def test_a_forced_tool_is_a_block_with_its_input(gate, client):
    says(gate, '{"a": 1}')
    answer = say(client, USER, tools=[TOOL], tool_choice={"type": "tool", "name": "f"})
    (block,) = answer.content
    assert (block.type, block.name, block.input) == ("tool_use", "f", {"a": 1})
    assert answer.stop_reason == "tool_use"


def test_the_events_of_a_stream_come_in_order(gate, client):
    says(gate, "yo")
    with client.messages.stream(model="agent", max_tokens=8, messages=[USER]) as stream:
        kinds = [event.type for event in stream if event.type != "text"]
        answer = stream.get_final_message()
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert answer.content[0].text == "yo"
    assert (answer.stop_reason, answer.usage.output_tokens) == ("end_turn", 3)


def test_a_streamed_call_is_a_block_of_its_own(gate, client):
    says(gate, '{"a": 1}')
    with client.messages.stream(
        model="agent",
        max_tokens=32,
        messages=[USER],
        tools=[TOOL],
        tool_choice={"type": "tool", "name": "f"},
    ) as stream:
        answer = stream.get_final_message()
    assert [(block.type, block.input) for block in answer.content] == [("tool_use", {"a": 1})]
    assert answer.stop_reason == "tool_use"


def test_blocks_become_messages_of_the_template():
    body = MessagesRequest.model_validate(
        {
            "model": "m",
            "max_tokens": 5,
            "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
            "tools": [TOOL],
            "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
            "metadata": {"user_id": "u"},
            "messages": [
                USER,
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "hm", "signature": ""},
                        {"type": "text", "text": "I call"},
                        {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"a": 1}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "toolu_1",
                            "content": [{"type": "text", "text": "2"}],
                        },
                        {"type": "text", "text": "go on"},
                    ],
                },
            ],
        }
    )
    chat = body.to_chat()
    assert [message["role"] for message in chat.messages] == [
        "system",
        "user",
        "assistant",
        "tool",
        "user",
    ]
    said = chat.messages[2]
    assert (said["content"], said["reasoning_content"]) == ("I call", "hm")
    assert said["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a":1}'}
    assert (chat.messages[3]["content"], chat.messages[4]["content"]) == ("2", "go on")
    assert (chat.tool_choice, chat.parallel_tool_calls) == ("required", False)


@pytest.mark.parametrize(
    ("changes", "kind", "sentence"),
    [
        ({"model": "nobody"}, "not_found_error", "unknown model"),
        ({"max_tokens": 0}, "invalid_request_error", "max_tokens"),
        ({"extra_body": {"wishes": 1}}, "invalid_request_error", "unknown field 'wishes'"),
        ({"tool_choice": {"type": "x"}}, "invalid_request_error", "tool_choice.type"),
        ({"tool_choice": {"type": "any"}}, "invalid_request_error", "required needs tools"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "invalid_request_error",
            "takes only text",
        ),
        ({"extra_headers": {"X-Api-Key": "tml-no"}}, "authentication_error", "API key"),
    ],
)
def test_errors_have_the_form_of_anthropic(client, changes, kind, sentence):
    with pytest.raises(anthropic.APIStatusError) as refused:
        say(client, USER, **changes)
    assert refused.value.body["type"] == "error"
    assert refused.value.body["error"]["type"] == kind
    assert sentence in refused.value.body["error"]["message"]


def test_a_trace_records_messages_and_continues_them_in_either_form(gate):
    trace = Trace(gate)
    client = client_of(trace.made["base_url"], api_key=trace.key)
    says(gate, "yo")
    answer = say(client, USER, model="claude")
    assert answer.model == "agent"
    again = {"role": "assistant", "content": [b.model_dump() for b in answer.content]}
    says(gate, "ok")
    say(client, USER, again, {"role": "user", "content": [{"type": "text", "text": "go"}]})
    trace.say(
        "end",
        USER,
        {"role": "assistant", "content": "yo"},
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "ok"},
        USER,
    )
    (sequence,) = trace.sequences
    assert sampled_of(sequence) == "yo<eos>ok<eos>end<eos>"
    assert "<|user|>go<eos>" in text_of(sequence)


def test_a_streamed_message_is_recorded(gate):
    trace = Trace(gate)
    client = client_of(trace.made["base_url"], api_key=trace.key)
    says(gate, "yo")
    with client.messages.stream(model="claude", max_tokens=8, messages=[USER]) as stream:
        assert stream.get_final_text() == "yo"
    assert [sampled_of(each) for each in trace.sequences] == ["yo<eos>"]


def test_unusual_blocks_are_refused_or_shown_and_never_a_fault_of_the_server(gate, client):
    says(gate, "yo")
    call = {"type": "tool_use", "id": "1", "name": "f", "input": {"n": 10**30}}
    answer = say(client, USER, {"role": "assistant", "content": [call]}, USER)
    assert answer.content[0].text == "yo"
    result = {"type": "tool_result", "tool_use_id": "1", "content": 5}
    with pytest.raises(anthropic.BadRequestError, match="neither a text nor blocks"):
        say(client, USER, {"role": "user", "content": [result]})
