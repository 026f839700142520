from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, processors

from gateway.api.openai.prompts import PreparedPrompt, prompts_of
from gateway.api.openai.responses import Choice, NewTokens
from gateway.api.openai.schemas import CompletionRequest
from gateway.api.openai.tokenizer import ModelTokenizer, offsets_of
from tandem.v1 import sampler_pb2
from tests.support.gateway.speaking_models import (
    byte_tokenizer,
    letter_tokenizer,
    sentence_tokenizer,
    write_speaking_model,
)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizers")
    trimming = byte_tokenizer()
    trimming.post_processor = processors.ByteLevel(trim_offsets=True)
    kinds = {
        "bytes": (byte_tokenizer(), {}),
        "trimming": (trimming, {}),
        "sentences": (sentence_tokenizer(), {"eos_token": "</s>", "bos_token": "<s>"}),
        "letters": (letter_tokenizer(), {}),
    }
    return {
        name: ModelTokenizer(name, write_speaking_model(folder / name, made, **config))
        for name, (made, config) in kinds.items()
    }


def choice_of(tokenizer, *, stop=(), **fields):
    request = CompletionRequest(model="m", prompt="x", **{"logprobs": 3, **fields})
    params = sampler_pb2.SamplingParams(stop_strings=stop)
    return Choice(
        request, index=0, prompt=PreparedPrompt([], text=""), params=params, tokenizer=tokenizer
    )


def written(tokenizer, rows, **fields):
    """Logprobs of rows, one per token. A row has the alternatives, the sampled token first."""
    tokens = NewTokens(
        ids=[row[0][0] for row in rows],
        logprobs=[row[0][1] for row in rows],
        alternatives=[sorted(row, key=lambda cell: -cell[1]) for row in rows],
        finish="length",
    )
    return choice_of(tokenizer, **fields).write_tokens(tokens, "whole")["logprobs"]


# --- Names -----------------------------------------------------------------------------------


def test_the_likeliest_of_several_tokens_with_one_name_keeps_it(tokenizers):
    sentences = tokenizers["sentences"]._tokenizer
    blank, byte = sentences.token_to_id("▁"), sentences.token_to_id("<0x20>")
    other = sentences.token_to_id("!")
    (top,) = written(tokenizers["sentences"], [[(other, -0.5), (blank, -1.0), (byte, -2.0)]])[
        "top_logprobs"
    ]
    assert top == {"!": -0.5, " ": -1.0, f"token_id:{byte}": -2.0}


@pytest.mark.parametrize("shown", [0, 1, 3])
def test_the_entry_of_the_sampled_token_is_its_own(tokenizers, shown):
    sentences = tokenizers["sentences"]._tokenizer
    blank, byte = sentences.token_to_id("▁"), sentences.token_to_id("<0x20>")
    found = written(tokenizers["sentences"], [[(byte, -2.0), (blank, -1.0)]], logprobs=shown)
    assert (found["tokens"], found["token_logprobs"]) == ([" "], [-2.0])
    if shown:
        assert found["top_logprobs"] == [{" ": -2.0, f"token_id:{blank}": -1.0}]


def test_rows_without_a_token_are_told_apart(tokenizers):
    found = written(tokenizers["letters"], [[(900, -1.0), (901, -1.5), (902, -2.0)]])
    assert found["tokens"] == ["token_id:900"]
    assert found["top_logprobs"] == [
        {"token_id:900": -1.0, "token_id:901": -1.5, "token_id:902": -2.0}
    ]


# --- Places ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bytes", "trimming"])
def test_the_offsets_of_a_prompt_are_where_its_tokens_begin(tokenizers, kind):
    tokenizer = tokenizers[kind]
    text = "a the € é"
    offsets = tokenizer.offsets(text, add_special_tokens=True)
    assert offsets == [0, 1, 5, 6, 6, 7, 8, 8]
    ids = tokenizer.encode(text, add_special_tokens=True)
    assert offsets_of(ids, tokenizer, text) == offsets


def test_a_special_token_that_the_text_has_not_takes_no_place_in_it(tokenizers):
    offsets = tokenizers["sentences"].offsets("hello world", add_special_tokens=True)
    assert offsets == [0, 0, 5]
    [prompt] = prompts_of(
        CompletionRequest(model="m", prompt="hello world", echo=True, max_tokens=0, logprobs=0),
        tokenizers["sentences"],
        max_length=None,
    )
    assert (prompt.text, prompt.offsets) == ("hello world", [0, 0, 5])


def test_a_token_that_ends_in_the_middle_of_a_character_is_before_it(tokenizers):
    tokenizer = tokenizers["bytes"]
    tokenizer._tokenizer.decoder = decoders.ByteLevel()
    ids = [*tokenizer.encode("€", add_special_tokens=False)]
    assert offsets_of([*ids, *ids], tokenizer, "€€") == [0, 0, 1, 1]


def places_of(tokenizer, tokens):
    return offsets_of(tokens, tokenizer, tokenizer.decode(tokens))


def test_bytes_that_are_no_character_do_not_move_the_token_after_them(tokenizers):
    tokenizer = tokenizers["bytes"]
    half, rest = tokenizer.encode("€", add_special_tokens=False)  # of two bytes, and of one
    word, end = (tokenizer._tokenizer.token_to_id(name) for name in ("the", "<eos>"))
    assert places_of(tokenizer, [half, word]) == [0, 1]
    assert places_of(tokenizer, [rest, rest, word, word]) == [0, 1, 2, 5]
    assert places_of(tokenizer, [half, half, rest, word]) == [0, 1, 1, 2]
    assert places_of(tokenizer, [word, half, end, word]) == [0, 3, 4, 9]


def test_the_bytes_of_a_character_after_a_wrong_byte_begin_together(tokenizers):
    tokenizer = tokenizers["bytes"]
    wrong, first = (tokenizer._tokenizer.token_to_id(name) for name in ("¡", "à"))
    assert tokenizer.decode([wrong, first, wrong, wrong]) == "\ufffd\u0861"
    assert places_of(tokenizer, [wrong, first, wrong, wrong]) == [0, 1, 1, 1]


def test_the_bytes_of_one_character_begin_together(tokenizers):
    sentences = tokenizers["sentences"]
    ids = [sentences._tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in "a€😀".encode()]
    assert places_of(sentences, ids) == [0, 1, 1, 1, 2, 2, 2, 2]
    bad = sentences._tokenizer.token_to_id("<0xFF>")
    word = sentences._tokenizer.token_to_id("hello")
    assert places_of(sentences, [bad, word]) == [0, 1]


TEXTS = st.text(st.sampled_from("aé€😀 the\n"), max_size=30)


@given(
    TEXTS, st.lists(st.integers(0, 60), max_size=6), st.sampled_from(["", "e", "the", "€ ", "aé"])
)
@settings(max_examples=200, deadline=None)
def test_offsets_are_places_in_the_text_however_it_is_streamed(tokenizers, text, cuts, stop):
    tokenizer = tokenizers["bytes"]
    ids = tokenizer.encode(text, add_special_tokens=False)
    stops = [stop] if stop else []
    edges = sorted({0, len(ids), *(cut for cut in cuts if cut < len(ids))})
    parts = [ids[a:b] for a, b in itertools.pairwise(edges)] or [[]]
    choice, told, shown = choice_of(tokenizer, stop=stops), "", []
    for number, part in enumerate(parts):
        finish = "stop" if number == len(parts) - 1 else None
        tokens = NewTokens(part, [-1.0] * len(part), [()] * len(part), finish)
        content = choice.write_tokens(tokens, "part")
        told += content["text"]
        shown += content["logprobs"]["text_offset"]
        assert all(offset <= len(told) for offset in content["logprobs"]["text_offset"])
    wanted = text.partition(stop)[0] if stop else text
    assert told == wanted
    whole = tokenizer.offsets(text, add_special_tokens=False)
    assert shown == [min(offset, len(wanted)) for offset in whole]


@pytest.mark.parametrize("kind", ["bytes", "sentences"])
@given(st.lists(st.integers(0, 258), max_size=30), st.lists(st.integers(0, 30), max_size=6))
@settings(max_examples=100, deadline=None)
def test_a_whole_token_is_found_at_its_offset_also_among_noise(tokenizers, kind, tokens, cuts):
    tokenizer = tokenizers[kind]
    edges = sorted({0, len(tokens), *(cut for cut in cuts if cut < len(tokens))})
    parts = [tokens[a:b] for a, b in itertools.pairwise(edges)] or [[]]
    choice, text, names, offsets = choice_of(tokenizer), "", [], []
    for number, part in enumerate(parts):
        finish = "stop" if number == len(parts) - 1 else None
        content = choice.write_tokens(
            NewTokens(part, [-1.0] * len(part), [()] * len(part), finish), "part"
        )
        text += content["text"]
        names += content["logprobs"]["tokens"]
        offsets += content["logprobs"]["text_offset"]
    assert len(names) == len(tokens)
    assert offsets == sorted(offsets)
    assert all(offset <= len(text) for offset in offsets)
    for token, name, offset in zip(tokens, names, offsets, strict=True):
        known = tokenizer.token(token)
        # A sentence tokenizer decodes bytes with one wrong byte to wrong characters only.
        whole = known.text.isascii() and len(known.raw) > 0 and kind == "bytes"
        if whole and token not in tokenizer.special:
            assert text[offset:].startswith(name), (text, names, offsets)
