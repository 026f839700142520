"""Chat templates give transformers' text and tokens, in a sandbox."""

from __future__ import annotations

import json

import pytest
from pydantic import ValidationError

from gateway.api.errors import InvalidParameter
from gateway.api.openai.chat_template import ChatTemplate, find_template
from gateway.api.openai.schemas import ChatCompletionRequest
from gateway.api.openai.tokenizer import ModelTokenizer
from tandem.errors import InvalidRequest, UnsupportedInput
from tests.support.gateway.speaking_models import (
    CHAT_TEMPLATE,
    byte_tokenizer,
    sentence_tokenizer,
    write_speaking_model,
)

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": ' the € is\n😀 <b>"x"</b> '},
]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"ä": [1, "<"]}}}]
STRICT = """{{ bos_token }}{% for m in messages %}
{% if loop.index0 == 0 and m.role == 'user' %}{% continue %}{% endif %}
  {% generation %}[{{ m['role'] }}] {{ m['content'] }}{% endgeneration %}
{% if loop.last %}{% break %}{% endif %}
{% endfor %}
{% if add_generation_prompt %}{{ strftime_now("%Y") }}>{% endif %}"""


def chat_request(messages, **changes):
    try:
        return ChatCompletionRequest(model="m", messages=messages, **changes)
    except ValidationError as error:
        raise error.errors()[0]["ctx"]["error"] from error  # as the error handler does


def render(template, messages=MESSAGES, *, bounds=None, **changes):
    template = ChatTemplate(template, special_tokens={"eos_token": "</s>"}, **(bounds or {}))
    return template.render(chat_request(messages, **changes))


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, STRICT], ids=["own", "strict"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tools": TOOLS},
        {"chat_template_kwargs": {"thinking": True}},
        {"add_generation_prompt": False},
        {"add_generation_prompt": False, "continue_final_message": True},
    ],
    ids=["plain", "tools", "kwargs", "no prompt", "continued"],
)
def test_the_text_and_the_tokens_are_those_of_transformers(tmp_path, template, changes):
    from transformers import AutoTokenizer

    folder = write_speaking_model(tmp_path / "m", byte_tokenizer(), template=template)
    reference = AutoTokenizer.from_pretrained(folder)
    more = dict(changes)
    expected = reference.apply_chat_template(
        MESSAGES,
        tokenize=False,
        **({"add_generation_prompt": True} | more | more.pop("chat_template_kwargs", {})),
    )
    tokenizer = ModelTokenizer("m", folder)
    text = tokenizer.chat_template().render(chat_request(MESSAGES, **changes))
    assert text == expected
    tokens = tokenizer.encode(text, add_special_tokens=False)
    assert tokens == reference(expected, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(tokens) == text


@pytest.mark.parametrize(
    ("make", "named"),
    [(byte_tokenizer, {}), (sentence_tokenizer, {"eos_token": "</s>", "bos_token": "<s>"})],
)
def test_a_prompt_has_the_tokens_of_transformers(tmp_path, make, named):
    from transformers import PreTrainedTokenizerFast

    folder = write_speaking_model(tmp_path / "m", make(), **named)
    reference = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer = ModelTokenizer("m", folder)
    for text in ("hello world!", " the €", "a"):
        assert tokenizer.encode(text, add_special_tokens=True) == reference(text)["input_ids"]
    assert set(reference.all_special_ids) <= tokenizer.special


def test_parts_of_text_are_one_text():
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert "<|user|>one\ntwo</s>" in render(CHAT_TEMPLATE, [{"role": "user", "content": parts}])


def test_a_calls_arguments_are_written_out_by_the_template():
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "c"},
    ]
    assert '<|assistant|>(add {"a": 1})</s>\n<|tool|>2</s>' in render(CHAT_TEMPLATE, messages)


FIELDS = (
    "{% for m in messages %}{{ m.role }}:"
    "{% for name in m | sort %}{% if name != 'role' %} {{ name }}={{ m[name] }}{% endif %}"
    "{% endfor %};{% endfor %}"
)


@pytest.mark.parametrize(
    "empty",
    [
        {"tool_calls": []},
        {"tool_calls": None, "function_call": None},
        {"refusal": None, "annotations": [], "audio": None},
        {"reasoning_content": "", "name": ""},
        {"metadata": {}},
    ],
)
def test_fields_without_content_do_not_reach_the_template(empty):
    message = {"role": "assistant", "content": "fine"}
    assert (
        render(FIELDS, [message | empty]) == render(FIELDS, [message]) == "assistant: content=fine;"
    )


def test_an_answer_of_the_client_is_a_message_of_the_next_request():
    from openai.types.chat import ChatCompletionMessage

    answer = ChatCompletionMessage(role="assistant", content="fine")
    assert render(FIELDS, [answer.model_dump()]) == "assistant: content=fine;"
    silent = ChatCompletionMessage(role="assistant", content=None, refusal="no")
    assert render(FIELDS, [silent.model_dump()]) == "assistant: content= refusal=no;"


def test_a_false_or_zero_field_is_content():
    message = {"role": "user", "content": "x", "seen": False, "score": 0}
    assert render(FIELDS, [message]) == "user: content=x score=0 seen=False;"


def test_a_refusal_and_an_empty_part_are_text():
    parts = [{"type": "text", "text": None}, {"type": "refusal", "refusal": "no"}]
    assert render(FIELDS, [{"role": "assistant", "content": parts}]) == "assistant: content=\nno;"


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ('{"a": ', '"{\\"a\\": "'),
        ("city=Köln", '"city=Köln"'),
        ("", "{}"),
        (None, "{}"),
        ({"a": 1}, '{"a": 1}'),
        ("[1]", "[1]"),
    ],
)
def test_arguments_that_are_not_json_are_passed_on_as_text(arguments, shown):
    call = {"id": None, "type": "function", "function": {"name": "f", "arguments": arguments}}
    template = (
        "{% for c in messages[0].tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}"
    )
    assert render(template, [{"role": "assistant", "tool_calls": [call]}]) == shown


@pytest.mark.parametrize(
    ("messages", "changes", "error", "sentence"),
    [
        ([{"role": "clown", "content": "x"}], {}, InvalidRequest, "unknown role clown"),
        ([{"content": "x"}], {}, InvalidParameter, "messages.0 has no role"),
        ([{"role": "user", "content": 3}], {}, InvalidParameter, "neither a text nor a list"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            {},
            UnsupportedInput,
            "part of type 'image_url'",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"function": None}]}],
            {},
            InvalidParameter,
            "a tool call without a function",
        ),
        (
            [{"role": "assistant", "tool_calls": {"function": {}}}],
            {},
            InvalidParameter,
            "tool_calls that are not a list",
        ),
        (MESSAGES, {"continue_final_message": True}, InvalidParameter, "add_generation_prompt"),
        (
            MESSAGES,
            {"chat_template_kwargs": {"messages": []}},
            InvalidParameter,
            "chat_template_kwargs.messages",
        ),
    ],
)
def test_invalid_messages_are_refused_with_the_reason(messages, changes, error, sentence):
    with pytest.raises(error, match=sentence):
        render(CHAT_TEMPLATE, messages, **changes)


@pytest.mark.parametrize(
    "escape",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ raise_exception.__globals__.os }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{% for i in range(1000000000) %}{% endfor %}",
    ],
)
def test_a_template_reaches_nothing_but_its_variables(escape):
    with pytest.raises(InvalidRequest):
        render(escape)


@pytest.mark.parametrize(
    "endless",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}.{% endfor %}{% endfor %}",
        "{% macro on(n) %}{% for a in range(n) %}.{% endfor %}{% endmacro %}"
        "{% set all %}{% for b in range(99999) %}{{ on(9999) }}{% endfor %}{% endset %}",
    ],
    ids=["text", "nothing written"],
)
def test_an_endless_template_is_stopped(endless):
    with pytest.raises(InvalidRequest, match=r"no end within 0\.2 s"):
        render(endless, bounds={"max_seconds": 0.2})


def test_the_output_of_a_template_is_bounded():
    with pytest.raises(InvalidRequest, match="more than 1000 characters"):
        render("{% for a in range(99999) %}.{% endfor %}", bounds={"max_characters": 1000})


def test_tools_have_a_template_of_their_own_where_the_model_has_one():
    templates = {"default": "plain", "tool_use": "with {{ tools | length }}"}
    assert render(templates) == "plain"
    assert render(templates, tools=TOOLS) == "with 1"
    assert render(templates, tools=TOOLS, tool_choice="none") == "plain"


def test_a_template_is_found_in_every_place_that_models_have_it(tmp_path):
    named = [{"name": "default", "template": "b"}, {"name": "tool_use", "template": "t"}]
    assert find_template(tmp_path, {}) == ""
    assert find_template(tmp_path, {"chat_template": "a"}) == "a"
    assert find_template(tmp_path, {"chat_template": named}) == {"default": "b", "tool_use": "t"}
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "c"}))
    assert find_template(tmp_path, {"chat_template": "a"}) == "c"
    (tmp_path / "chat_template.jinja").write_text("d")
    assert find_template(tmp_path, {"chat_template": "a"}) == "d"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("e")
    assert find_template(tmp_path, {}) == {"default": "d", "tool_use": "e"}
