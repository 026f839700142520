"""Grammars are compiled beside the engine, once for all requests, and within a deadline."""

from __future__ import annotations

import asyncio
import queue
import re
import threading
from collections import defaultdict
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sampler_service.structured_output import (
    CompiledGrammar,
    Grammar,
    GrammarCompiler,
    compile_grammar,
    load_tokenizer,
    parse_structured_output,
)
from tandem.errors import Overloaded, StructuredOutputInvalid, UnsupportedInput
from tandem.v1 import sampler_pb2
from tests.support.tiny_model import VOCABULARY
from tests.support.virtual_time import run_in_virtual_time

MODEL: dict[str, Any] = {"vocabulary": VOCABULARY, "end_tokens": (1,)}
GRAMMARS = [Grammar("regex", f"[{letter}]") for letter in "abcd"]


class Slow:
    def __init__(self) -> None:
        self.go = threading.Event()
        self.may_end = defaultdict(lambda: self.go)
        self.begun: queue.SimpleQueue[Grammar] = queue.SimpleQueue()
        self.compiled: list[Grammar] = []

    def compile_one(self, grammar: Grammar, tokenizer: Any) -> CompiledGrammar:
        self.begun.put(grammar)
        self.may_end[grammar].wait(timeout=60)
        self.compiled.append(grammar)
        return CompiledGrammar(grammar, tokenizer)


def compiler_of(slow: Slow, *, seconds: float) -> GrammarCompiler:
    return GrammarCompiler(
        Path(),
        **MODEL,
        compile_seconds=seconds,
        load=lambda: None,  # type: ignore[arg-type,return-value]
        compile_one=slow.compile_one,
    )


def test_a_grammar_that_takes_too_long_is_refused_and_those_behind_it_may_try_again():
    async def scenario() -> None:
        slow = Slow()
        compiler = compiler_of(slow, seconds=0.2)
        outcomes = await asyncio.gather(
            *(compiler.compile(grammar) for grammar in GRAMMARS), return_exceptions=True
        )
        kinds = [type(each) for each in outcomes]
        assert sorted(kinds, key=str) == [Overloaded] * 2 + [StructuredOutputInvalid] * 2
        slow.go.set()
        assert isinstance(await compiler.compile(GRAMMARS[3]), CompiledGrammar)

    asyncio.run(scenario())


def test_a_grammar_is_compiled_once():
    async def scenario() -> None:
        slow = Slow()
        slow.go.set()
        compiler = compiler_of(slow, seconds=60)
        first, again = [await compiler.compile(GRAMMARS[0]) for _ in range(2)]
        assert first is again
        assert slow.compiled == GRAMMARS[:1]

    asyncio.run(scenario())


def test_equal_grammars_that_come_together_are_compiled_once():
    async def scenario() -> None:
        slow = Slow()
        compiler = compiler_of(slow, seconds=60)
        asked = [asyncio.create_task(compiler.compile(GRAMMARS[0])) for _ in range(32)]
        await asyncio.sleep(0)
        asked.pop().cancel()  # the others still get their result
        slow.go.set()
        assert len(set(await asyncio.gather(*asked))) == 1
        assert slow.compiled == GRAMMARS[:1]

    asyncio.run(scenario())


def test_a_grammar_has_its_time_from_when_it_is_begun():
    async def scenario() -> None:
        slow = Slow()
        slow.may_end = {grammar: threading.Event() for grammar in GRAMMARS}
        compiler = compiler_of(slow, seconds=10.0)
        compiler._tokenizer = Future()
        compiler._tokenizer.set_result(None)  # type: ignore[arg-type]
        first, second, third = [
            asyncio.create_task(compiler.compile(grammar)) for grammar in GRAMMARS[:3]
        ]
        for _ in range(2):
            await asyncio.to_thread(slow.begun.get, timeout=60)
        await asyncio.sleep(6.0)
        slow.may_end[GRAMMARS[0]].set()
        assert await asyncio.to_thread(slow.begun.get, timeout=60) == GRAMMARS[2]
        await asyncio.sleep(6.0)
        assert first.done() and not third.done()
        with pytest.raises(StructuredOutputInvalid, match="not compiled within 10 s"):
            await compiler.compile(GRAMMARS[1])
        assert slow.begun.empty(), "a thread is at it still"
        for event in slow.may_end.values():
            event.set()
        compiler._threads.shutdown()
        assert (await third).source == GRAMMARS[2]
        with pytest.raises(StructuredOutputInvalid):
            await second

    run_in_virtual_time(scenario())


def test_a_tokenizer_that_did_not_load_is_tried_again():
    async def scenario() -> None:
        tries: list[int] = []

        def load() -> Any:
            tries.append(1)
            if len(tries) == 1:
                raise UnsupportedInput("not now")

        slow = Slow()
        slow.go.set()
        compiler = GrammarCompiler(Path(), **MODEL, load=load, compile_one=slow.compile_one)
        with pytest.raises(UnsupportedInput):
            await compiler.compile(GRAMMARS[0])
        assert isinstance(await compiler.compile(GRAMMARS[0]), CompiledGrammar)

    asyncio.run(scenario())


def test_a_model_without_an_end_token_cannot_end_a_grammar(tmp_path: Path):
    with pytest.raises(UnsupportedInput, match="end token"):
        load_tokenizer(tmp_path, vocabulary=VOCABULARY, end_tokens=())


def test_a_model_without_a_tokenizer_takes_no_grammars(tmp_path: Path):
    with pytest.raises(UnsupportedInput, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path, **MODEL)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UnsupportedInput, match="does not load"):
        load_tokenizer(tmp_path, **MODEL)


def test_tokens_of_a_byte_level_tokenizer_are_the_bytes_that_they_stand_for(tmp_path: Path):
    """Real models have such tokenizers, other tests' tiny models do not."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merged = [("a", "b"), ("ab", "c"), ("Ã", "©")]  # the last are the bytes of é
    vocabulary = {t: i for i, t in enumerate([*alphabet, *("".join(m) for m in merged), "<end>"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merged))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    end = vocabulary["<end>"]
    size = len(vocabulary) + 7  # models have more rows than tokens

    async def allowed(grammar: Grammar) -> list[set[int]]:
        compiled = await GrammarCompiler(tmp_path, vocabulary=size, end_tokens=(end,)).compile(
            grammar
        )
        import llguidance.numpy

        mask = llguidance.numpy.allocate_token_bitmask(1, size)
        matcher, steps = compiled.matcher(), []
        for token in ("ab", "Ã©"):
            llguidance.numpy.fill_next_token_bitmask(matcher, mask, 0)
            bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
            steps.append(set(np.flatnonzero(bits).tolist()))
            assert matcher.consume_token(vocabulary[token])
        assert matcher.is_accepting()
        return steps

    first, second = asyncio.run(allowed(Grammar("regex", "ab[cé]?")))
    assert first == {vocabulary[token] for token in ("a", "ab", "abc")}
    assert second == {vocabulary[token] for token in ("c", "Ã", "Ã©")} | {end}


@pytest.mark.parametrize("kind", ["letters", "bytes"])
@pytest.mark.parametrize(
    "schema", ['{"type": "object"}', '{"type": "integer"}', '{"enum": ["A"]}', '{"type": "string"}']
)
def test_a_schema_that_the_tokens_cannot_express_is_refused_for_that(
    tmp_path: Path, kind: str, schema: str
):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    characters = "abcdefghijklmnopqrstuvwxyz "
    if kind == "letters":  # the token for unknown characters is not special
        vocabulary = {token: id_ for id_, token in enumerate(["<unk>", "<end>", *characters])}
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
        tokenizer.decoder = decoders.Fuse()
    else:
        vocabulary = {token: id_ for id_, token in enumerate(["<unk>", "<end>", *characters[:-1]])}
        tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    compiler = GrammarCompiler(tmp_path, vocabulary=len(vocabulary), end_tokens=(1,))
    with pytest.raises(
        StructuredOutputInvalid, match="the JSON schema asks for text that the model has no tokens"
    ):
        asyncio.run(compiler.compile(Grammar("json_schema", schema)))


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ('{"type": "array", "minItems": 9223372036854775808}', "add up to 9.22337e.18"),
        ('{"items": {"maxItems": 1e12, "maxItems": 1.0}}', "add up to 1e.12"),
        ('{"anyOf": [{"maxItems": 60000}, {"minItems": 60000}]}', "add up to 120000"),
        ('{"maxItems": ' + "9" * 5000 + "}", "add up to inf"),
        ("[" * 5000, "is refused"),
    ],
)
def test_a_schema_of_too_many_items_is_refused_before_they_take_all_memory(schema: str, why: str):
    tokenizer: Any = None  # nothing is compiled
    with pytest.raises(StructuredOutputInvalid, match=why):
        compile_grammar(Grammar("json_schema", schema), tokenizer)


@pytest.mark.parametrize(
    ("lark", "why"),
    [
        ('start: %json {"type": "array", "items": {}, "minItems": 1099511627776}', "%json"),
        ('start: %lark {\n start: %json {"minItems": 1099511627776}\n}', "%json"),
        ('start: %lark {\n start: "a"\n}', "%lark"),
        ('{"grammars": [{"json_schema": {"minItems": 1099511627776}}]}', "expecting rule"),
        ("start: missing", "unknown name"),
        ("", "no start rule"),
        ("start: " + "(" * 20_000 + '"a"' + ")" * 20_000, "too deeply nested"),
        (
            'start: %regex {"substring_chars": "' + " ".join(map(str, range(11_000))) + '"}',
            "too big",
        ),
        ("start: (" + "|".join(f"/a{n}.*b/" for n in range(3000)) + ")*", "is too large"),
        ("start: a{0,500000}\na: b{0,50000}\nb: c{0,50000}\nc: | /[xy]/", "is too large"),
    ],
)
def test_a_bad_lark_grammar_is_refused_within_the_budget(lark: str, why: str):
    from llguidance import LLTokenizer

    with pytest.raises(StructuredOutputInvalid, match=f"the Lark grammar.*{re.escape(why)}"):
        compile_grammar(Grammar("lark", lark), LLTokenizer("byte"))


def test_a_lark_grammar_matches_what_no_regex_does():
    from llguidance import LLTokenizer

    message = sampler_pb2.StructuredOutput(lark='start: "(" start ")" | /[0-9]+/')
    grammar = parse_structured_output(message)
    assert grammar is not None
    compiled = compile_grammar(grammar, LLTokenizer("byte"))
    for text, fits in {"((42))": True, "7": True, "((4)": False, "(4))": False, "a": False}.items():
        matcher = compiled.matcher()
        taken = all(matcher.consume_token(byte) for byte in text.encode())
        assert (taken and matcher.is_accepting()) == fits, text


@pytest.mark.parametrize("form", ["regex", "json_schema", "lark"])
def test_a_text_of_any_form_has_a_bound(form: str):
    message = sampler_pb2.StructuredOutput(**{form: "x" * 70_000})
    with pytest.raises(StructuredOutputInvalid, match="70000 bytes; at most"):
        parse_structured_output(message)


def test_a_choice_matches_its_texts_and_nothing_else():
    from llguidance import LLMatcher, LLTokenizer

    texts = ["it.depends(a|b)*", "#~& -\n\t", "a\\b^$[]{}?+", "é日😀<>%"]
    message = sampler_pb2.StructuredOutput(
        choice=sampler_pb2.StructuredOutput.Choices(choices=texts)
    )
    grammar = parse_structured_output(message)
    assert grammar is not None
    source = LLMatcher.grammar_from_regex(grammar.text)
    tokenizer = LLTokenizer("byte")
    for text in texts:
        matcher = LLMatcher(tokenizer, source, log_level=0)
        assert all(matcher.consume_token(byte) for byte in text.encode())
        assert matcher.is_accepting()
    for other in ("it,", "#!", "ab", "aab"):
        matcher = LLMatcher(tokenizer, source, log_level=0)
        assert not matcher.consume_tokens(list(other.encode()))
