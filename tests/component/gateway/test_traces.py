"""Traces: an agent's chats, recorded with the exact tokens."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import openai
import pytest
import tinker

from gateway.api.openai import traces
from tests.support.gateway.speaking_models import (
    byte_tokenizer,
    says,
)
from tests.support.gateway.traces import USER, Trace, agent_gateway, sampled_of, text_of


@pytest.fixture(scope="module")
def gate(tmp_path_factory):
    with agent_gateway(tmp_path_factory.mktemp("models")) as gate:
        yield gate


def test_a_chat_of_two_turns_is_one_sequence_with_the_sampled_tokens(gate):
    trace = Trace(gate)
    answer = trace.say("yo", USER).choices[0].message
    assert answer.content == "yo"
    # As the client repeats it, with fields that the template does not need.
    trace.say("ok", USER, answer.model_dump(), {"role": "user", "content": "go"})
    (sequence,) = trace.sequences
    assert (
        text_of(sequence)
        == "<|user|>hi<eos>\n<|assistant|>yo<eos>\n<|user|>go<eos>\n<|assistant|>ok<eos>"
    )
    assert sampled_of(sequence) == "yo<eos>ok<eos>"
    assert [message["role"] for message in sequence["messages"]] == ["user", "assistant"] * 2
    assert sequence["turns"] == [0, 1]


def test_the_next_turn_is_sampled_from_the_recorded_tokens_and_not_from_their_text(gate):
    trace = Trace(gate)
    engine = says(gate, "")
    letters = [byte_tokenizer().token_to_id(piece) for piece in ("t", "h", "e")]  # "the" is a token
    engine.speak = lambda _prompt: [*letters, byte_tokenizer().token_to_id("<eos>")]
    trace.client.chat.completions.create(model="any", messages=[USER])
    trace.say("ok", USER, {"role": "assistant", "content": "the"}, USER)
    prompt = np.frombuffer(engine.requests[-1].prompt_tokens, np.int32).tolist()
    (sequence,) = trace.sequences
    tokens = sequence["datum"]["model_input"]
    assert prompt == tokens[: len(prompt)]
    at = next(i for i in range(len(prompt)) if prompt[i : i + 3] == letters)
    assert sequence["datum"]["loss_fn_inputs"]["logprobs"][at - 1 : at + 2] == [0.0, -1.0, -2.0]


def test_an_answer_without_an_end_token_gets_the_end_of_the_template(gate):
    trace = Trace(gate)
    trace.say("yo", USER, end=False)
    trace.say("ok", USER, {"role": "assistant", "content": "yo"}, USER)
    (sequence,) = trace.sequences
    assert "<|assistant|>yo<eos>\n<|user|>" in text_of(sequence)
    assert sampled_of(sequence) == "yook<eos>"


def test_a_repeated_request_is_a_branch_and_its_tokens_are_trained_once(gate):
    trace = Trace(gate)
    trace.say("yo", USER)
    asked = [USER, {"role": "assistant", "content": "yo"}, USER]
    trace.say("a", *asked)
    trace.say("b", *asked)
    first, second = trace.sequences
    assert (sampled_of(first), sampled_of(second)) == ("yo<eos>a<eos>", "b<eos>")
    assert (first["turns"], second["turns"]) == ([0, 1], [0, 2])


def test_messages_that_extend_no_conversation_begin_a_new_sequence(gate):
    trace = Trace(gate)
    trace.say("yo", USER)
    trace.say("sub", {"role": "system", "content": "other"}, USER)
    trace.say("c", USER, {"role": "assistant", "content": "edited"}, USER)
    assert len(trace.sequences) == 3


def test_other_tools_begin_a_new_sequence(gate):
    trace = Trace(gate)
    trace.say("yo", USER)
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    trace.say("b", USER, {"role": "assistant", "content": "yo"}, USER, tools=tools)
    assert len(trace.sequences) == 2


def test_a_streamed_turn_is_recorded_before_the_stream_ends(gate):
    trace = Trace(gate)
    parts = trace.say("yo", USER, stream=True)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == "yo"
    trace.say("ok", USER, {"role": "assistant", "content": "yo"}, USER)
    assert [sampled_of(each) for each in trace.sequences] == ["yo<eos>ok<eos>"]


def test_a_message_may_have_numbers_of_any_size(gate):
    trace = Trace(gate)
    trace.say("yo", USER | {"number": 2**70})
    (sequence,) = trace.sequences
    assert sequence["messages"][0]["number"] == 2**70


def test_each_of_several_choices_is_a_turn(gate):
    trace = Trace(gate)
    trace.say("yo", USER, n=2)
    assert [sampled_of(each) for each in trace.sequences] == ["yo<eos>", "yo<eos>"]


def test_a_sequence_is_a_datum_of_the_sdk(gate):
    trace = Trace(gate)
    trace.say("yo", USER)
    (sequence,) = trace.sequences
    inputs = sequence["datum"]["loss_fn_inputs"]
    datum = tinker.Datum(
        model_input=tinker.ModelInput.from_ints(sequence["datum"]["model_input"]),
        loss_fn_inputs={
            **inputs,
            "mask": np.array(inputs["mask"], np.float32),
            "advantages": [0.5] * len(inputs["mask"]),
        },
    )
    assert len(datum.model_input.to_ints()) == len(sequence["steps"])
    (run,) = sequence["versions"]
    assert (run["version"], run["step"], run["tokens"]) == ("base/agent", 0, 3)
    assert sequence["steps"][run["start"] :] == [0, 0, 0]
    assert set(sequence["steps"][: run["start"]]) == {None}


def test_a_trace_bounds_the_age_of_the_weights_of_its_requests(gate):
    trace = Trace(gate, max_staleness=2)
    with pytest.raises(openai.BadRequestError, match="a base model has one version"):
        trace.say("yo", USER)


@pytest.mark.parametrize("path", ["/chat/completions", "/messages"])
@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"null", b'{"messages": 5}', b'{"model": "m"}', b"\xff"]
)
def test_a_malformed_body_is_refused_and_records_nothing(gate, path, content):
    trace = Trace(gate)
    answer = gate.http(trace.key).post(
        f"{trace.made['base_url']}/v1{path}",
        content=content,
        headers={"Content-Type": "application/json"},
    )
    assert answer.status_code == 400
    assert isinstance(answer.json()["error"], dict)
    assert trace.sequences == []


@pytest.mark.parametrize(
    "fields", [{"continue_final_message": True}, {"add_generation_prompt": False}]
)
def test_a_trace_records_whole_answers_only(gate, fields):
    trace = Trace(gate)
    fields = {"add_generation_prompt": False} | fields
    with pytest.raises(openai.BadRequestError, match="whole answers"):
        trace.say("yo", USER, extra_body=fields)


def test_a_trace_of_an_unknown_model_is_refused(gate):
    answer = gate.http().post("/api/tandem/v1/traces", json={"model": "nobody"})
    assert (answer.status_code, answer.json()["type"]) == (404, "unknown_model")


def test_an_ended_trace_answers_with_its_reason_and_can_still_be_read(gate):
    trace = Trace(gate)
    trace.say("yo", USER)
    head = gate.gateway.recorder.require_trace(trace.id).head
    head.expires_at = 1.0
    with pytest.raises(openai.APIStatusError, match="has expired") as refused:
        trace.say("ok", USER)
    assert (refused.value.status_code, refused.value.code) == (410, "trace_ended")
    assert len(trace.sequences) == 1


def test_a_deleted_trace_is_unknown_and_its_key_is_refused(gate):
    trace = Trace(gate)
    assert gate.http().delete(trace.url).status_code == 204
    assert gate.http().get(trace.url).status_code == 404
    with pytest.raises(openai.AuthenticationError):
        trace.say("yo", USER)


def test_turns_at_once_are_all_recorded(gate):
    trace = Trace(gate)
    trace.say("yo", USER)
    messages = [USER, {"role": "assistant", "content": "yo"}, USER]

    def ask(_number: int) -> str:
        answer = trace.client.chat.completions.create(model="any", messages=messages)
        return answer.choices[0].message.content

    with ThreadPoolExecutor(8) as threads:
        answers = [*threads.map(ask, range(24))]
    assert answers == ["yo"] * 24
    sequences = trace.sequences
    assert len(sequences) == 24
    assert sum(len(sequence["turns"]) for sequence in sequences) == 48
    assert {sampled_of(sequence) for sequence in sequences[1:]} == {"yo<eos>"}


def test_a_trace_goes_on_after_a_new_gateway(tmp_path):
    with agent_gateway(tmp_path) as gate:
        trace = Trace(gate)
        trace.say("yo", USER)
    with agent_gateway(tmp_path) as gate:
        trace.gate = gate
        url = f"{gate.url}/traces/{trace.id}/v1"
        trace.client = openai.OpenAI(base_url=url, api_key=trace.key, max_retries=0)
        trace.say("ok", USER, {"role": "assistant", "content": "yo"}, USER)
        assert [sampled_of(each) for each in trace.sequences] == ["yo<eos>ok<eos>"]


def test_a_trace_with_many_branches_is_read_in_parts(gate, monkeypatch):
    monkeypatch.setattr(traces, "_PART_BYTES", 100)
    trace = Trace(gate)
    trace.say("yo", USER)
    asked = [USER, {"role": "assistant", "content": "yo"}, USER]
    trace.say("a", *asked, n=20)
    with gate.http().stream("GET", trace.url) as response:
        assert "content-length" not in response.headers
        response.read()
    found = response.json()
    assert (found["turns"], len(found["sequences"])) == (21, 20)
    assert [sampled_of(each) for each in found["sequences"]] == ["yo<eos>a<eos>", *["a<eos>"] * 19]
