"""Compiles forms for the model's tokens, beside the engine and with limits.

llguidance does the work: it compiles in milliseconds, lets other threads run meanwhile, computes
the mask of a step within a budget ("fuel") whatever the form, and refuses what it does not
implement of JSON schema instead of passing it over. It knows no look-around and no back-reference.

The tokenizer is loaded with the first form: a second or two that no other start has to spend.
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sampler_service.engine import EngineFacts
from sampler_service.forms import Form
from tandem.errors import Overloaded, StructuredOutputInvalid, UnsupportedInput

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from transformers import PreTrainedTokenizerFast

COMPILE_SECONDS = 10.0
TOKENIZER_SECONDS = 120.0
_KEPT = 64
_THREADS = 2
_BUILD_FUEL = 500_000
_STEP_FUEL = 100_000
_STEP_ITEMS = 50_000
_LEXER_STATES = 32_768
_GRAMMAR_SIZE = 100_000
_TRIED_TOKENS = 4
_DEAD_END = "NoExtensionBias"
"""llguidance's name for a place where no token is left."""


class CompiledForm:
    """A form for one model's tokens. Samples share it, and each begins with a copy."""

    def __init__(self, start: LLMatcher) -> None:
        self._start = start

    def begin(self) -> LLMatcher:
        return self._start.deep_copy()


class FormCompiler:
    """Literal use: `compiler = FormCompiler(Path("models/tiny"), engine.facts)`, then
    `compiled = await compiler.compile(Form("regex", "yes|no"))`."""

    def __init__(
        self,
        model: Path,
        facts: EngineFacts,
        *,
        seconds: float = COMPILE_SECONDS,
        tokenizer_seconds: float = TOKENIZER_SECONDS,
        load: Callable[[Path, EngineFacts], LLTokenizer] | None = None,
        compile_one: Callable[[Form, LLTokenizer], CompiledForm] | None = None,
    ) -> None:
        """`seconds` is how long one form may take, `tokenizer_seconds` how long the first may wait
        for the tokenizer. `load` and `compile_one` do the work: `load_tokenizer`, `compile_form`.
        """
        self._model = model
        self._facts = facts
        self._seconds = seconds
        self._tokenizer_seconds = tokenizer_seconds
        self._load = load or load_tokenizer
        self._compile_one = compile_one or compile_form
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="forms")
        self._tokenizer: Future[LLTokenizer] | None = None
        self._kept: OrderedDict[Form, CompiledForm] = OrderedDict()

    async def compile(self, form: Form) -> CompiledForm:
        """Raises `StructuredOutputInvalid` when it cannot be done for this form,
        `UnsupportedInput` when it cannot be done for this model, and `Overloaded` when too many
        others wait. The engine goes on meanwhile."""
        known = self._kept.get(form)
        if known is not None:
            self._kept.move_to_end(form)
            return known
        if self._tokenizer is None or (self._tokenizer.done() and self._tokenizer.exception()):
            self._tokenizer = self._threads.submit(self._load, self._model, self._facts)
        loading = asyncio.shield(asyncio.wrap_future(self._tokenizer))
        try:
            tokenizer = await asyncio.wait_for(loading, self._tokenizer_seconds)
        except TimeoutError as error:
            raise Overloaded("the tokenizer is still being loaded; try again") from error
        began = threading.Event()

        def work() -> CompiledForm:
            began.set()
            return self._compile_one(form, tokenizer)

        job = self._threads.submit(work)
        try:
            compiled = await asyncio.wait_for(asyncio.wrap_future(job), self._seconds)
        except TimeoutError as error:
            if not began.is_set():
                raise Overloaded("the forms of others are being compiled; try again") from error
            raise StructuredOutputInvalid(
                f"the form was not compiled within {self._seconds:g} s; make it simpler"
            ) from error
        self._kept[form] = compiled
        while len(self._kept) > _KEPT:
            self._kept.popitem(last=False)
        return compiled


def compile_form(form: Form, tokenizer: LLTokenizer) -> CompiledForm:
    """Raises `StructuredOutputInvalid`."""
    import xgrammar  # noqa: F401 (what vLLM applies masks with; imported here, not in a step)
    from llguidance import LLMatcher, LLParserLimits

    name = {"regex": "the regex", "json_schema": "the JSON schema"}[form.kind]
    try:
        grammar = (
            LLMatcher.grammar_from_regex(form.text)
            if form.kind == "regex"
            else LLMatcher.grammar_from_json_schema(form.text, overrides={"lenient": False})
        )
    except ValueError as error:
        raise StructuredOutputInvalid(f"{name} is refused: {first_line(str(error))}") from error
    limits = LLParserLimits(
        initial_lexer_fuel=_BUILD_FUEL,
        step_lexer_fuel=_STEP_FUEL,
        step_max_items=_STEP_ITEMS,
        max_lexer_states=_LEXER_STATES,
        max_grammar_size=_GRAMMAR_SIZE,
        verbose_errors=False,
    )
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    if matcher.is_error():
        raise StructuredOutputInvalid(f"{name} is refused: {first_line(matcher.get_error())}")
    _try(matcher, name=name, vocabulary=tokenizer.vocab_size)
    return CompiledForm(matcher)


def _try(matcher: LLMatcher, *, name: str, vocabulary: int) -> None:
    """Follows a form for some tokens: what is beyond the budget mostly is so at once."""
    import llguidance.numpy

    probe = matcher.deep_copy()
    mask = llguidance.numpy.allocate_token_bitmask(1, vocabulary)
    for _ in range(_TRIED_TOKENS):
        llguidance.numpy.fill_next_token_bitmask(probe, mask, 0)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        if probe.is_stopped() and not probe.is_error():
            return
        if _DEAD_END in probe.get_error() or not len(allowed):
            raise StructuredOutputInvalid(f"{name} asks for text that the model has no tokens for")
        if probe.is_error():
            raise StructuredOutputInvalid(f"{name} is too large: {first_line(probe.get_error())}")
        probe.consume_token(int(allowed[0]))


def first_line(message: str) -> str:
    """llguidance's messages on one line, without the pointer into the text."""
    lines = [line.strip() for line in message.splitlines()]
    shown = [line for line in lines if line and line != "<non-verbose/>" and set(line) != {"^"}]
    return " ".join(shown)[:500]


def load_tokenizer(model: Path, facts: EngineFacts) -> LLTokenizer:
    """The model's tokens as bytes, for llguidance. Raises `UnsupportedInput`."""
    import llguidance.hf
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if not facts.end_tokens:
        raise UnsupportedInput(
            "structured output needs a model with an end token, which closes the form"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            model, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError) as error:
        raise UnsupportedInput(
            f"structured output needs the model's tokenizer, which does not load: {error}"
        ) from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise UnsupportedInput("structured output needs a tokenizer of the `tokenizers` library")
    ends = list(facts.end_tokens)
    try:
        return llguidance.hf.from_tokenizer(tokenizer, n_vocab=facts.vocabulary, eos_token=ends)
    except ValueError:  # it knows byte-level tokenizers and those with byte tokens alone
        return _by_decoding(tokenizer, facts)


def _by_decoding(tokenizer: PreTrainedTokenizerFast, facts: EngineFacts) -> LLTokenizer:
    """For tokenizers whose tokens are plain text, one after the other."""
    from llguidance import LLTokenizer
    from llguidance._tokenizer import TokenizerWrapper

    return LLTokenizer(
        TokenizerWrapper(_PlainTokens(tokenizer, facts)),
        n_vocab=facts.vocabulary,
        eos_token=list(facts.end_tokens),
    )


class _PlainTokens:
    """The attributes that llguidance asks a tokenizer for."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, facts: EngineFacts) -> None:
        known = set(tokenizer.get_vocab().values())
        special = set(tokenizer.all_special_ids) | set(facts.end_tokens)
        self.eos_token_id = facts.end_tokens[0]
        self.bos_token_id = None
        self.tokens = [
            tokenizer.decode([token]).encode()
            if token in known and token not in special
            else f"<|{token}|>".encode()
            for token in range(facts.vocabulary)
        ]
        self.special_token_ids = [
            token for token in range(facts.vocabulary) if token in special or token not in known
        ]
        self._special = frozenset(self.special_token_ids)
        self._encode = tokenizer.backend_tokenizer.encode

    def __call__(self, text: str) -> Sequence[int]:
        """The tokens of a text, up to what no token stands for."""
        ids: list[int] = self._encode(text, add_special_tokens=False).ids
        return list(takewhile(lambda token: token not in self._special, ids))
