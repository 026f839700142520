"""Agents with tools: OpenAI's and Anthropic's clients, recorded from a real engine."""

from __future__ import annotations

import json

import anthropic
import httpx
import openai
import pytest
import tinker

from tandem.demo.tiny_model import TinyShape, write_tiny_model
from tests.support.stacks import running

pytestmark = pytest.mark.slow

MODEL = "test/agent"
SHAPE = TinyShape(hidden=64, layers=2, ffn=128, heads=2, vocabulary=1024, max_length=2048)
ADD = {
    "name": "add",
    "description": "Add two digits.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
}
TOOLS = [{"type": "function", "function": ADD}]
CALL = r"""start: <tool_call> BODY </tool_call>
BODY: /\n\{"name": "add", "arguments": \{"a": [1-9]\}\}\n/"""
USER = {"role": "user", "content": "What is 2 + 3?"}


@pytest.fixture(scope="module")
def stack(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "agent"
    write_tiny_model(folder, seed=5, shape=SHAPE, tokenizer="qwen")
    with running(tmp_path_factory.mktemp("data"), models={MODEL: folder}) as stack:
        yield stack


@pytest.fixture(scope="module")
def rest(stack):
    endpoint = stack.stack.endpoint
    headers = {"X-API-Key": endpoint.api_key}
    with httpx.Client(base_url=endpoint.url, headers=headers, timeout=300) as client:
        yield client


@pytest.fixture
def trace(rest) -> dict:
    return rest.post("/api/tandem/v1/traces", json={"model": MODEL}).raise_for_status().json()


def openai_of(trace: dict) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{trace['base_url']}/v1", api_key=trace["key"], max_retries=0, timeout=300
    )


def ask(trace: dict, messages, **changes):
    extra = {"guided_grammar": CALL} | changes.pop("extra_body", {})
    fields = {"model": "any", "tools": TOOLS, "max_tokens": 64, "extra_body": extra}
    client = openai_of(trace).with_options(max_retries=changes.pop("max_retries", 0))
    return client.chat.completions.create(messages=messages, **(fields | changes))


def check_logprobs(stack, rest, trace: dict, *, sampled: int) -> dict:
    """The recorded tokens are one sequence, whose logprobs the engine computes again."""
    found = rest.get(f"/api/tandem/v1/traces/{trace['id']}").raise_for_status().json()
    (sequence,) = found["sequences"]
    inputs = sequence["datum"]["loss_fn_inputs"]
    tokens = [*sequence["datum"]["model_input"], inputs["target_tokens"][-1]]
    with stack.service() as service:
        sampling = service.create_sampling_client(base_model=MODEL).result(timeout=240)
        prompt = tinker.ModelInput.from_ints(tokens)
        scored = sampling.compute_logprobs(prompt).result(timeout=240)[1:]
    rows = zip(inputs["mask"], inputs["logprobs"], scored, strict=True)
    chosen = [(mine, theirs) for mask, mine, theirs in rows if mask]
    assert len(sequence["turns"]) == sampled
    for mine, theirs in chosen:
        assert mine == pytest.approx(theirs, abs=1e-4)
    return sequence


def test_an_agent_of_openai_calls_tools_and_its_tokens_are_those_of_the_engine(stack, rest, trace):
    # A grammar changes the distribution, so these turns are free text.
    free = {"guided_grammar": None}
    first = ask(trace, [USER], extra_body=free, max_tokens=12).choices[0]
    assert first.finish_reason in ("length", "stop")
    messages = [USER, first.message.model_dump(exclude_none=True), {"role": "user", "content": "?"}]
    stream = ask(trace, messages, extra_body=free, max_tokens=12, stream=True, seed=3)
    text = "".join(part.choices[0].delta.content or "" for part in stream)
    messages += [{"role": "assistant", "content": text}, USER]
    ask(trace, messages, extra_body=free, max_tokens=12)
    check_logprobs(stack, rest, trace, sampled=3)


def test_a_turn_after_a_kill_of_the_gateway_continues_the_recorded_ones(stack, rest, trace):
    free = {"extra_body": {"guided_grammar": None}, "max_tokens": 12}
    first = ask(trace, [USER], **free).choices[0].message.model_dump(exclude_none=True)
    stack.stack.process.kill()
    # OpenAI's client tries again until the next gateway listens.
    ask(trace, [USER, first, USER], max_retries=20, **free)
    check_logprobs(stack, rest, trace, sampled=2)


@pytest.mark.parametrize("streamed", [False, True])
def test_a_call_in_the_models_own_form_is_parsed_and_continued(rest, trace, streamed):
    answer = ask(trace, [USER], stream=streamed)
    if streamed:
        parts = [part.choices[0] for part in answer]
        assert not any(part.delta.content for part in parts)
        (call,) = next(part.delta.tool_calls for part in parts if part.delta.tool_calls)
        assert parts[-1].finish_reason == "tool_calls"
    else:
        (choice,) = answer.choices
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        (call,) = choice.message.tool_calls
    assert call.function.name == "add"
    assert json.loads(call.function.arguments)["a"] in range(1, 10)
    function = {"name": "add", "arguments": call.function.arguments}
    said = {"id": call.id, "type": "function", "function": function}
    result = {"role": "tool", "tool_call_id": call.id, "content": "5"}
    messages = [USER, {"role": "assistant", "tool_calls": [said]}, result]
    assert ask(trace, messages).choices[0].finish_reason == "tool_calls"
    (sequence,) = rest.get(f"/api/tandem/v1/traces/{trace['id']}").json()["sequences"]
    assert [message["role"] for message in sequence["messages"]] == [
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert sequence["turns"] == [0, 1]


def test_reasoning_is_apart_from_the_content(trace):
    asked = {"guided_grammar": "start: <think> /[a-z]{3}/ </think> /[A-Z]{3}/"}
    message = ask(trace, [USER], extra_body=asked).choices[0].message
    assert message.content.strip().isupper()
    assert message.reasoning_content.strip().islower()


def test_a_required_tool_is_called(trace):
    small = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    tools = [{"type": "function", "function": ADD | {"parameters": small}}]
    for choice in ("required", {"type": "function", "function": {"name": "add"}}):
        answer = ask(
            trace,
            [USER],
            tools=tools,
            tool_choice=choice,
            parallel_tool_calls=False,
            max_tokens=512,
            extra_body={"guided_grammar": None},
            temperature=0,
        ).choices[0]
        if answer.finish_reason == "length":  # the model may write blanks for ever
            continue
        (call,) = answer.message.tool_calls
        assert json.loads(call.function.arguments)["a"] in (1, 2)


def test_an_agent_of_anthropic_is_recorded_as_well(stack, rest, trace):
    client = anthropic.Anthropic(
        base_url=trace["base_url"], api_key=trace["key"], max_retries=0, timeout=300
    )
    tools = [{"name": "add", "description": "Add.", "input_schema": ADD["parameters"]}]
    asked = {"model": "claude", "max_tokens": 8, "system": "Be kind.", "tools": tools}
    answer = client.messages.create(messages=[USER], **asked)
    again = {"role": "assistant", "content": [b.model_dump() for b in answer.content]}
    with client.messages.stream(messages=[USER, again, USER], **asked) as stream:
        final = stream.get_final_message()
    assert final.usage.output_tokens > 0
    check_logprobs(stack, rest, trace, sampled=2)


def test_an_unknown_parser_is_refused(trace):
    with pytest.raises(openai.BadRequestError, match=r"unknown tool_parser .*hermes"):
        ask(trace, [USER], extra_body={"tool_parser": "best"})
