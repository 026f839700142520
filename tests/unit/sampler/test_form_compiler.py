"""Forms are compiled beside the engine, one for all who ask, and nobody waits for ever."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sampler_service.engine import EngineFacts
from sampler_service.form_compiler import CompiledForm, FormCompiler, load_tokenizer
from sampler_service.forms import Form
from tandem.errors import Overloaded, StructuredOutputInvalid, UnsupportedInput
from tests.support.tiny_model import VOCABULARY

FACTS = EngineFacts(
    vocabulary=VOCABULARY, max_length=9, dtype="float32", device="cpu", name="x", end_tokens=(1,)
)
FORMS = [Form("regex", f"[{letter}]") for letter in "abcd"]


class Slow:
    """Compiles when it is let."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.compiled: list[Form] = []

    def compile_one(self, form: Form, tokenizer: Any) -> CompiledForm:
        self.go.wait(timeout=60)
        self.compiled.append(form)
        return CompiledForm(tokenizer)


def compiler_of(slow: Slow, *, seconds: float) -> FormCompiler:
    return FormCompiler(
        Path(),
        FACTS,
        seconds=seconds,
        load=lambda _path, _facts: None,  # type: ignore[arg-type,return-value]
        compile_one=slow.compile_one,
    )


def test_a_form_that_takes_too_long_is_refused_and_those_behind_it_are_told_to_come_again():
    async def scenario() -> None:
        slow = Slow()
        compiler = compiler_of(slow, seconds=0.2)
        outcomes = await asyncio.gather(
            *(compiler.compile(form) for form in FORMS), return_exceptions=True
        )
        kinds = [type(each) for each in outcomes]
        assert sorted(kinds, key=str) == [Overloaded] * 2 + [StructuredOutputInvalid] * 2
        slow.go.set()
        assert isinstance(await compiler.compile(FORMS[3]), CompiledForm)

    asyncio.run(scenario())


def test_a_form_is_compiled_once():
    async def scenario() -> None:
        slow = Slow()
        slow.go.set()
        compiler = compiler_of(slow, seconds=60)
        first, again = [await compiler.compile(FORMS[0]) for _ in range(2)]
        assert first is again
        assert slow.compiled == FORMS[:1]

    asyncio.run(scenario())


def test_a_tokenizer_that_did_not_load_is_tried_again():
    async def scenario() -> None:
        tries: list[int] = []

        def load(_path: Path, _facts: EngineFacts) -> Any:
            tries.append(1)
            if len(tries) == 1:
                raise UnsupportedInput("not now")

        slow = Slow()
        slow.go.set()
        compiler = FormCompiler(Path(), FACTS, load=load, compile_one=slow.compile_one)
        with pytest.raises(UnsupportedInput):
            await compiler.compile(FORMS[0])
        assert isinstance(await compiler.compile(FORMS[0]), CompiledForm)

    asyncio.run(scenario())


def test_a_model_without_an_end_token_cannot_close_a_form(model: Path):
    facts = EngineFacts(
        vocabulary=VOCABULARY, max_length=9, dtype="float32", device="cpu", name="x", end_tokens=()
    )
    with pytest.raises(UnsupportedInput, match="end token"):
        load_tokenizer(model, facts)


def test_a_model_without_a_tokenizer_takes_no_forms(tmp_path: Path):
    with pytest.raises(UnsupportedInput, match="tokenizer"):
        load_tokenizer(tmp_path, FACTS)


def test_tokens_of_a_byte_level_tokenizer_are_the_bytes_that_they_stand_for(tmp_path: Path):
    """Real models' tokenizers are of this kind; the tiny ones of other tests are not."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merged = [("a", "b"), ("ab", "c"), ("Ã", "©")]  # the last are the bytes of é
    vocabulary = {t: i for i, t in enumerate([*alphabet, *("".join(m) for m in merged), "<end>"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merged))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    fast.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    end = vocabulary["<end>"]
    facts = EngineFacts(
        vocabulary=len(vocabulary) + 7,  # models have more rows than tokens
        max_length=9,
        dtype="float32",
        device="cpu",
        name="x",
        end_tokens=(end,),
    )

    async def allowed(form: Form) -> list[set[int]]:
        compiled = await FormCompiler(tmp_path, facts).compile(form)
        import llguidance.numpy

        mask = llguidance.numpy.allocate_token_bitmask(1, facts.vocabulary)
        matcher, steps = compiled.begin(), []
        for token in ("ab", "Ã©"):
            llguidance.numpy.fill_next_token_bitmask(matcher, mask, 0)
            bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
            steps.append(set(np.flatnonzero(bits).tolist()))
            assert matcher.consume_token(vocabulary[token])
        assert matcher.is_accepting()
        return steps

    first, second = asyncio.run(allowed(Form("regex", "ab[cé]?")))
    assert first == {vocabulary[token] for token in ("a", "ab", "abc")}
    assert second == {vocabulary[token] for token in ("c", "Ã", "Ã©")} | {end}
