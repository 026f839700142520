"""The tiny model with Qwen's special tokens and chat template."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tandem.demo.tiny_model import QWEN_SHAPE, write_tiny_model

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Add 2 and 3."}]},
    {
        "role": "assistant",
        "reasoning_content": "I add.",
        "content": "",
        "tool_calls": [{"function": {"name": "add", "arguments": {"a": 2, "b": 3}}}],
    },
    {"role": "tool", "content": "5"},
    {"role": "assistant", "content": "<think>\nFive.\n</think>\n\nIt is 5."},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "qwen"
    write_tiny_model(path, seed=1, tokenizer="qwen")
    return path


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(model)


@pytest.mark.parametrize(
    "text",
    ["<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_response>", "7"],
)
def test_special_tokens_and_digits_are_single_tokens(tokenizer, text):
    assert len(tokenizer.encode(f"{text}{text}")) == 2


def test_any_text_survives_encoding(tokenizer):
    for text in (
        "Zürich 東京 😀\t\n  x",
        '<think>\n</think> {"a": 12}',
        Path(__file__).read_text(),
    ):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_decoding_hides_control_tokens_and_keeps_thoughts(tokenizer):
    ids = tokenizer.encode("<think>a</think>b<|im_end|>")
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<think>a</think>b"


def test_the_configuration_names_the_tokenizers_ids(model, tokenizer):
    written = json.loads((model / "config.json").read_text())
    ends = json.loads((model / "generation_config.json").read_text())["eos_token_id"]
    assert len(tokenizer) == written["vocab_size"] == QWEN_SHAPE.vocabulary
    assert tokenizer.eos_token_id == written["eos_token_id"] == ends[0]
    assert tokenizer.convert_ids_to_tokens(ends) == ["<|im_end|>", "<|endoftext|>"]


def test_the_template_shows_tools_calls_and_results(tokenizer):
    shown = tokenizer.apply_chat_template(TALK, tools=[ADD], tokenize=False)
    assert shown.startswith("<|im_start|>system\nBe brief.\n\n# Tools")
    assert json.dumps(ADD) in shown
    assert (
        "<|im_start|>assistant\n<think>\nI add.\n</think>\n\n<tool_call>\n"
        '{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n5\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n<think>\nFive.\n</think>\n\nIt is 5.<|im_end|>\n"
    ) in shown


def test_the_template_leaves_out_thoughts_before_the_users_last_turn(tokenizer):
    talk = [*TALK, {"role": "user", "content": "Thanks."}]
    shown = tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
    assert "think" not in shown
    assert shown.endswith("<|im_start|>user\nThanks.<|im_end|>\n<|im_start|>assistant\n")
    quiet = tokenizer.apply_chat_template(
        talk, tokenize=False, add_generation_prompt=True, enable_thinking=False
    )
    assert quiet == shown + "<think>\n\n</think>\n\n"
