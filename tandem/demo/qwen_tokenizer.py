"""Writes a small tokenizer with Qwen's special tokens and a chat template with tools.

A byte-level BPE, trained on `qwen/corpus.txt`, encodes any text. Qwen's special tokens are single
tokens, so renderers and parsers for Qwen3 work with it."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

END, PAD = "<|im_end|>", "<|endoftext|>"

_CONTROL = (
    PAD, "<|im_start|>", END, "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
    "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>",
    "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
_WRITTEN = (
    "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>",
    "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>",
    "<think>", "</think>",
)  # fmt: skip
"""Single tokens that stay in decoded text."""


def write_qwen_tokenizer(path: Path, *, vocabulary: int, max_length: int) -> dict[str, int]:
    """Write the tokenizer into `path`. Returns the ids of special tokens by their text.

    It has `vocabulary` tokens, the special ones last, as in Qwen's. Digits are single tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(_CONTROL) - len(_WRITTEN),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    data = files("tandem.demo") / "qwen"
    tokenizer.train_from_iterator((data / "corpus.txt").read_text().split("\n\n"), trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in _CONTROL])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in _WRITTEN])
    assert tokenizer.get_vocab_size() == vocabulary, "the corpus is too short for this vocabulary"
    tokenizer.save(str(path / "tokenizer.json"))
    configuration = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "eos_token": END,
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(configuration, indent=1))
    (path / "chat_template.jinja").write_text((data / "chat_template.jinja").read_text())
    known = tokenizer.get_vocab()
    return {text: known[text] for text in (*_CONTROL, *_WRITTEN)}
