from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.api.openai.tokenizer import Detokenizer, ModelTokenizer, StopCutter
from tests.support.gateway.speaking_models import (
    byte_tokenizer,
    letter_tokenizer,
    sentence_tokenizer,
    write_speaking_model,
)

TEXTS = st.text(st.sampled_from("aé€😀 the\n�ab"), max_size=40)
TOKENS = st.lists(st.integers(0, 265), max_size=40)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizers")
    kinds = {
        "bytes": (byte_tokenizer(), {}),
        "sentences": (sentence_tokenizer(), {"eos_token": "</s>", "bos_token": "<s>"}),
        "letters": (letter_tokenizer(), {}),
    }
    return {
        name: ModelTokenizer(name, write_speaking_model(folder / name, made, **config))
        for name, (made, config) in kinds.items()
    }


def pieces_of(tokens, cuts):
    edges = sorted({0, len(tokens), *(cut for cut in cuts if cut < len(tokens))})
    return [tokens[a:b] for a, b in itertools.pairwise(edges)]


def streamed(tokenizer, pieces, *, context=()):
    detokenizer = Detokenizer(tokenizer, context=context, skip_special_tokens=True)
    told = [detokenizer.push(piece) for piece in pieces]
    return [*told, detokenizer.finish()]


def token_of(sentences, byte):
    return sentences._tokenizer.token_to_id(f"<0x{byte:02X}>")


@given(TEXTS, st.lists(st.integers(0, 200), max_size=8))
@settings(max_examples=200, deadline=None)
def test_a_text_comes_back_in_whole_characters(tokenizers, text, cuts):
    tokenizer = tokenizers["bytes"]
    tokens = tokenizer.encode(text, add_special_tokens=False)
    told = streamed(tokenizer, pieces_of(tokens, cuts))
    assert "".join(told) == text
    if "�" not in text:
        assert not any("�" in part for part in told)


@pytest.mark.parametrize("kind", ["bytes", "sentences", "letters"])
@given(tokens=TOKENS, cuts=st.lists(st.integers(0, 40), max_size=8), context=TOKENS)
@settings(max_examples=300, deadline=None)
def test_any_tokens_give_the_same_text_however_they_are_split(
    tokenizers, kind, tokens, cuts, context
):
    tokenizer = tokenizers[kind]
    size = tokenizer._tokenizer.get_vocab_size()
    tokens = [t for t in tokens if t < size]
    context = [t for t in context if t < size]
    one_by_one = "".join(streamed(tokenizer, [[t] for t in tokens], context=context))
    assert "".join(streamed(tokenizer, pieces_of(tokens, cuts), context=context)) == one_by_one
    assert "".join(streamed(tokenizer, [tokens], context=context)) == one_by_one


def test_a_character_of_four_tokens_comes_with_the_last(tokenizers):
    tokens = tokenizers["bytes"].encode("😀!", add_special_tokens=False)
    assert len(tokens) == 5
    assert streamed(tokenizers["bytes"], [[t] for t in tokens]) == ["", "", "", "😀", "!", ""]


def test_an_incomplete_character_at_the_end_becomes_a_replacement_character(tokenizers):
    tokens = tokenizers["bytes"].encode("a€", add_special_tokens=False)
    assert "".join(streamed(tokenizers["bytes"], [tokens[:-1]])) == "a�"


def test_a_character_that_the_prompt_began_is_completed(tokenizers):
    *begun, last = tokenizers["bytes"].encode("a€", add_special_tokens=False)
    assert streamed(tokenizers["bytes"], [[last]], context=begun) == ["€", ""]
    assert streamed(tokenizers["bytes"], [], context=begun) == [""]
    context = [token_of(tokenizers["sentences"], byte) for byte in b"\x80\0\0\0\0"]
    tokens = [token_of(tokenizers["sentences"], byte) for byte in b"\xc2\x80\0"]
    assert streamed(tokenizers["sentences"], [tokens[:2], tokens[2:]], context=context) == [
        "\x80",
        "\0",
        "",
    ]


def test_bytes_of_a_sentence_tokenizer_become_characters_one_by_one(tokenizers):
    tokenizer = tokenizers["sentences"]
    tokens = [token_of(tokenizer, byte) for byte in "😀😀".encode() * 3]
    told = streamed(tokenizer, [[t] for t in tokens])
    assert [part for part in told if part] == ["😀"] * 6


def test_a_word_keeps_the_blank_before_it_because_of_what_stands_before(tokenizers):
    tokenizer = tokenizers["sentences"]
    hello, world = (tokenizer._tokenizer.token_to_id(t) for t in ("▁hello", "▁world"))
    assert "".join(streamed(tokenizer, [[hello]], context=[1])) == "hello"
    assert "".join(streamed(tokenizer, [[world]], context=[1, hello])) == " world"


def test_noise_is_not_held_back_forever(tokenizers):
    tokens = tokenizers["bytes"].encode("€", add_special_tokens=False)[:1] * 100
    detokenizer = Detokenizer(tokenizers["bytes"], context=(), skip_special_tokens=True)
    told = [detokenizer.push([token]) for token in tokens]
    assert sum(map(len, told)) >= 60


# --- Stop strings -------------------------------------------------------------------------


def cut(text_pieces, stops, **changes):
    cutter = StopCutter(stops, **changes)
    told = [cutter.push(piece) for piece in text_pieces]
    return [*told, cutter.finish()], cutter.stopped


def test_a_possible_stop_string_is_held_back_until_it_is_certain():
    assert cut(["ab", "c", "d"], ["cx"]) == (["ab", "", "cd", ""], False)
    assert cut(["ab", "c", "xd"], ["cx"]) == (["ab", "", "", ""], True)
    assert cut(["ab", "c"], ["cx"]) == (["ab", "", "c"], False)


def test_a_stop_string_can_be_kept():
    assert cut(["ab", "cxd"], ["cx"], keep=True) == (["ab", "cx", ""], True)


def test_the_stop_string_that_ends_first_counts():
    assert "".join(cut(["xaby"], ["xaby", "ab"])[0]) == "x"
    assert "".join(cut(["xab"], ["b", "ab"])[0]) == "x"


@given(
    st.text("ab", max_size=30),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(0, 30), max_size=6),
    st.booleans(),
)
def test_a_stop_string_cuts_the_same_text_however_it_is_split(text, stops, cuts, keep):
    whole, stopped = cut([text], stops, keep=keep)
    parts, also_stopped = cut(pieces_of(text, cuts), stops, keep=keep)
    assert ("".join(parts), also_stopped) == ("".join(whole), stopped)
    assert stopped == any(stop in text for stop in stops)
    if not keep:
        assert not any(stop in "".join(whole) for stop in stops)


# --- Single tokens ------------------------------------------------------------------------


def test_a_part_of_a_character_is_known_by_its_bytes(tokenizers):
    tokenizer = tokenizers["bytes"]
    two, one = tokenizer.encode("€", add_special_tokens=False)
    assert (tokenizer.token(two).raw, tokenizer.token(one).raw) == (b"\xe2\x82", b"\xac")
    sentences = tokenizers["sentences"]
    assert sentences.token(token_of(sentences, 0xE2)).raw == b"\xe2"


def test_a_token_reads_as_it_does_within_a_text(tokenizers):
    sentences = tokenizers["sentences"]
    assert sentences.token(sentences._tokenizer.token_to_id("▁world")).text == " world"
    the = tokenizers["bytes"].encode(" the", add_special_tokens=False)
    assert [tokenizers["bytes"].token(t).text for t in the] == [" the"]


def test_special_tokens_have_names_and_add_no_text(tokenizers):
    tokenizer = tokenizers["bytes"]
    (end,) = tokenizer.end_tokens
    assert tokenizer.token(end).text == "<eos>"
    assert "".join(streamed(tokenizer, [[end, 65, end]])) == tokenizer.token(65).text
