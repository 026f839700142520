from __future__ import annotations

import json
from pathlib import Path

import pytest

from tandem.weights.model_config import end_tokens

ADDED = {"added_tokens": [{"id": 8, "content": "<end>"}], "model": {"vocab": {"a": 0}}}
LISTED = {"model": {"type": "Unigram", "vocab": [["<unk>", 0.0], ["</s>", 0.0], ["a", -1.5]]}}
NAMED = {"model": {"vocab": {"a": 0, "<stop>": 3}}}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"generation_config": {"eos_token_id": [3, 4]}}, (3, 4)),
        ({"generation_config": {}, "config": {"eos_token_id": 5}}, (5,)),
        ({"config": {"text_config": {"eos_token_id": 6}}}, (6,)),
        ({"generation_config": {"eos_token_id": 4}, "config": {"eos_token_id": 5}}, (4, 5)),
        ({"generation_config": {"eos_token_id": [4, 5]}, "config": {"eos_token_id": [5]}}, (4, 5)),
        ({"tokenizer_config": {"eos_token": "<end>"}, "tokenizer": ADDED}, (8,)),
        ({"tokenizer_config": {"eos_token": {"content": "<stop>"}}, "tokenizer": NAMED}, (3,)),
        ({"tokenizer_config": {"eos_token": {"content": "<end>"}}, "tokenizer": ADDED}, (8,)),
        ({"special_tokens_map": {"eos_token": "<stop>"}, "tokenizer": NAMED}, (3,)),
        ({"tokenizer_config": {"eos_token": "</s>"}, "tokenizer": LISTED}, (1,)),
        (
            {
                "tokenizer_config": {
                    "eos_token": "<end>",
                    "added_tokens_decoder": {"9": {"content": "<end>"}},
                }
            },
            (9,),
        ),
        (
            {
                "generation_config": {"eos_token_id": 4},
                "config": {"eos_token_id": 4},
                "tokenizer_config": {"eos_token": "<end>"},
                "tokenizer": ADDED,
            },
            (4, 8),
        ),
        ({"config": {"eos_token_id": 50256, "vocab_size": 400}}, ()),
        ({"config": {"eos_token_id": [None, True, -1, 7]}}, (7,)),
        ({"tokenizer_config": {"eos_token": "<lacking>"}, "tokenizer": LISTED}, ()),
        ({"tokenizer": NAMED}, ()),
    ],
)
def test_the_end_tokens_of_all_files_count(tmp_path: Path, files, expected):
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    assert end_tokens(tmp_path) == expected
