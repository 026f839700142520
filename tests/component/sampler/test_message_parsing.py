"""Tool calls and reasoning in answers, whole and token by token."""

from __future__ import annotations

import json
from array import array

import pytest

from sampler_service.service.parser_process import ParserProcess
from sampler_service.vllm.parsers import MessageParser
from tandem.demo.qwen_tokenizer import write_qwen_tokenizer
from tandem.errors import InvalidRequest, UnsupportedInput
from tandem.v1 import sampler_pb2

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
FOUND = [{"name": "add", "arguments": '{"a": 1}'}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("qwen")
    write_qwen_tokenizer(folder, vocabulary=1024, max_length=4096)
    found = AutoTokenizer.from_pretrained(folder)
    found.folder = folder
    return found


def request(tokenizer, *, prompt="<|im_start|>assistant\n", stops=(), tools=(ADD,), **fields):
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    chat = {"tools": list(tools), "tool_choice": "auto"} if tools else {}
    parse = {"tool_parser": "hermes", "reasoning_parser": "qwen3"} | fields
    return sampler_pb2.SampleRequest(
        prompt_tokens=array("i", ids).tobytes(),
        params=sampler_pb2.SamplingParams(stop_strings=stops),
        parse=sampler_pb2.MessageParsing(request=json.dumps(chat), **parse),
    )


def parsed(tokenizer, text: str, **fields) -> list[dict]:
    """The whole message, and the sum of what a stream says."""
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    parser, asked = MessageParser(tokenizer.folder, [end]), request(tokenizer, **fields)
    tokens = [*tokenizer.encode(text, add_special_tokens=False), end]
    stream, said = parser.open_answer(asked), {"reasoning": "", "content": "", "tool_calls": []}
    for index, token in enumerate(tokens):
        news = stream.push([token], finished=index == len(tokens) - 1)
        for name, more in json.loads(news or "{}").items():
            said[name] += more or type(said[name])()
    whole = json.loads(parser.open_answer(asked).whole(tokens))
    return [{name: value or type(said[name])() for name, value in whole.items()}, said]


def test_a_call_is_read_and_the_text_before_it_is_content(tokenizer):
    for found in parsed(tokenizer, f"I add.\n{CALL}"):
        assert found["tool_calls"] == FOUND
        assert found["content"].strip() == "I add."
        assert found["reasoning"] == ""


def test_several_calls_are_read_in_order(tokenizer):
    for found in parsed(tokenizer, f"{CALL}\n{CALL.replace('1', '2')}"):
        assert [call["arguments"] for call in found["tool_calls"]] == ['{"a": 1}', '{"a": 2}']


def test_reasoning_content_and_calls_are_separated(tokenizer):
    for found in parsed(tokenizer, f"<think>\nhm\n</think>\n\nSo: {CALL}"):
        assert found["reasoning"].strip() == "hm"
        assert found["content"].strip() == "So:"
        assert found["tool_calls"] == FOUND


def test_a_prompt_may_begin_the_reasoning(tokenizer):
    for found in parsed(tokenizer, "hm</think>yes", prompt="<|im_start|>assistant\n<think>\n"):
        assert (found["reasoning"], found["content"]) == ("hm", "yes")
    for found in parsed(tokenizer, "hm", prompt="<|im_start|>assistant\n<think>\n"):
        assert (found["reasoning"], found["content"]) == ("hm", "")


def test_an_answer_without_marks_is_content(tokenizer):
    for found in parsed(tokenizer, "a plain answer, <b>"):
        assert found == {"reasoning": "", "content": "a plain answer, <b>", "tool_calls": []}


def test_a_call_that_is_no_json_is_content(tokenizer):
    whole, _ = parsed(tokenizer, '<tool_call>\n{"name": "add", "argum')
    assert whole["tool_calls"] == []
    assert "argum" in whole["content"]


def test_a_stop_string_ends_the_text(tokenizer):
    for found in parsed(tokenizer, "one STOP", stops=["STOP"]):
        assert found["content"] == "one "


def test_a_stream_holds_back_only_the_beginning_of_a_stop_string(tokenizer):
    stream = MessageParser(tokenizer.folder, []).open_answer(request(tokenizer, stops=["..STOP"]))
    dot = tokenizer.encode(".", add_special_tokens=False)
    said = [stream.push(dot, finished=False) for _ in range(100)]
    text = "".join(json.loads(each)["content"] for each in said if each)
    assert text == "." * 98
    end = tokenizer.encode("STOP", add_special_tokens=False)
    assert not json.loads(stream.push(end, finished=True))["content"]


def test_a_character_of_several_tokens_arrives_whole(tokenizer):
    for found in parsed(tokenizer, "€ and 日本"):
        assert found["content"] == "€ and 日本"


def test_a_stream_waits_for_no_character_that_never_comes(tokenizer):
    (half,) = {tokenizer.encode("€", add_special_tokens=False)[0]}
    stream = MessageParser(tokenizer.folder, []).open_answer(request(tokenizer))
    assert "\ufffd" in tokenizer.decode([half])
    said = [stream.push([half], finished=False) for _ in range(100)]
    assert sum(map(bool, said)) >= 20
    text = "".join(json.loads(each)["content"] for each in said if each)
    assert text == tokenizer.decode([half] * 100)


def test_half_a_character_in_a_call_becomes_one_that_clients_read(tokenizer):
    for found in parsed(tokenizer, CALL.replace("1", '"\\ud800"')):
        text = json.dumps(found, ensure_ascii=False)
        assert "add" in text
        text.encode()


def test_reasoning_alone_can_be_parsed(tokenizer):
    for found in parsed(tokenizer, f"<think>a</think>{CALL}", tools=(), tool_parser=""):
        assert found["reasoning"] == "a"
        assert found["content"] == CALL


def test_an_unknown_parser_is_refused_with_the_known_ones(tokenizer):
    parser = MessageParser(tokenizer.folder, [])
    with pytest.raises(InvalidRequest, match=r"unknown tool_parser 'best'; known: .*hermes"):
        parser.open_answer(request(tokenizer, tool_parser="best"))


def test_tools_without_a_form_are_refused(tokenizer):
    parser = MessageParser(tokenizer.folder, [])
    with pytest.raises(InvalidRequest, match="does not fit"):
        parser.open_answer(
            request(tokenizer, tools=[{"type": "function", "function": {"name": 5}}])
        )


def test_a_model_without_a_tokenizer_is_refused(tokenizer, tmp_path):
    with pytest.raises(UnsupportedInput, match="tokenizer does not load"):
        MessageParser(tmp_path, []).open_answer(request(tokenizer))


CALLS, CALL_BEGIN, SEPARATOR = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"
CALL_END, CALLS_END = "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"


@pytest.fixture(scope="module")
def deepseek(tokenizer, tmp_path_factory):
    from transformers import AutoTokenizer

    found = AutoTokenizer.from_pretrained(tokenizer.folder)
    found.add_tokens([CALLS, CALL_BEGIN, SEPARATOR, CALL_END, CALLS_END])
    found.folder = tmp_path_factory.mktemp("deepseek")
    found.save_pretrained(found.folder)
    return found


@pytest.fixture(scope="module")
def process(deepseek):
    found = ParserProcess(deepseek.folder, [], seconds=1)
    yield found
    found.close()


def test_an_answer_that_stops_its_parser_is_content_and_leaves_the_others_whole(deepseek, process):
    tokens = deepseek.encode(f"So: {CALL}", add_special_tokens=False)
    other = process.open_answer(request(deepseek))
    said = [other.push(tokens[:-1], finished=False)]
    # Cubic in the length for vLLM's regular expression: minutes.
    text = CALLS + (CALL_BEGIN + SEPARATOR) * 4000 + f"\n```json\nx{CALL_END}\n\n```{CALL_END}"
    asked = request(deepseek, tool_parser="deepseek_v3", reasoning_parser="")
    hostile = deepseek.encode(text, add_special_tokens=False)
    found = json.loads(process.open_answer(asked).whole(hostile))
    assert found == {"reasoning": None, "content": text, "tool_calls": []}
    said.append(other.push(tokens[-1:], finished=True))
    news = [json.loads(each) for each in said if each]
    assert "".join(each["content"] or "" for each in news).strip() == "So:"
    assert news[-1]["tool_calls"] == FOUND
    whole = json.loads(process.open_answer(request(deepseek)).whole(tokens))
    assert whole["tool_calls"] == FOUND


def test_a_stream_that_takes_its_parser_long_goes_on_as_content(deepseek, process, monkeypatch):
    tokens = deepseek.encode(CALL, add_special_tokens=False)
    stream = process.open_answer(request(deepseek))
    said = [stream.push(tokens[:1], finished=False)]
    monkeypatch.setattr(process, "seconds", -1)  # any parse takes too long
    said += [stream.push([each], finished=False) for each in tokens[1:-1]]
    last = json.loads(stream.push(tokens[-1:], finished=True))
    text = "".join(json.loads(each)["content"] or "" for each in said if each) + last["content"]
    assert CALL.endswith(text)
    assert '"arguments"' in text
    assert last["tool_calls"] == []


def test_the_process_refuses_as_the_parser(tokenizer, process):
    process.open_answer(request(tokenizer)).check()
    with pytest.raises(InvalidRequest, match=r"unknown tool_parser 'best'; known: .*hermes"):
        process.open_answer(request(tokenizer, tool_parser="best")).check()
