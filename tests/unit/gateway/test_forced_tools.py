"""Answers that had to call a tool."""

from __future__ import annotations

import pytest

from gateway.api.openai.parsing import forced_message
from gateway.api.openai.schemas import ChatCompletionRequest

REQUEST = ChatCompletionRequest(
    model="m",
    messages=[{"role": "user", "content": "hi"}],
    tools=[{"type": "function", "function": {"name": "f"}}],
    tool_choice="required",
)


@pytest.mark.parametrize("text", ["[", "[1]", "5", "null", '"x"', '[{"name":"f"}]'])
def test_an_answer_of_another_form_is_content(text):
    assert forced_message(REQUEST, text) == {"content": text}


def test_an_answer_of_the_form_is_a_call():
    (call,) = forced_message(REQUEST, '[{"name": "f", "parameters": {"a": 1}}]')["tool_calls"]
    assert call == {"name": "f", "arguments": '{"a": 1}'}
