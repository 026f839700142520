"""Structured output: compiles a client's grammar for the model's tokens.

A regex, a JSON schema, a Lark grammar, a choice of texts or any JSON object becomes a grammar for
llguidance. It compiles in milliseconds, and computes each step's token mask within a budget
("fuel"). It refuses unsupported parts of JSON schema, look-around and back-references. The
tokenizer is loaded for the first grammar."""

from __future__ import annotations

import asyncio
import json
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from sampler_service.json_schema import rewrite_schema
from tandem.errors import (
    Overloaded,
    StructuredOutputInvalid,
    UnsupportedInput,
    describe,
    without_paths,
)
from tandem.v1 import sampler_pb2

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from tokenizers import Tokenizer

_MOST_BYTES = {"regex": 16 * 1024, "json_schema": 64 * 1024, "lark": 64 * 1024}
MAX_CHOICES = 1024
MAX_CHOICES_BYTES = 64 * 1024
_BOOLEAN_SCHEMAS = {"true": "{}", "false": '{"enum": []}'}

_KEPT_GRAMMARS = 64
_THREADS = 2
_TOKENIZER_SECONDS = 120.0
_BUILD_FUEL = 500_000
_STEP_FUEL = 100_000
_STEP_ITEMS = 50_000
_LEXER_STATES = 32_768
_GRAMMAR_SIZE = 100_000
_MOST_ITEMS = 100_000
_PROBED_TOKENS = 4
_OTHER_GRAMMARS = ("%json", "%lark")
"""Signs in a Lark grammar that begin a grammar of another kind."""
_NAMES = {"regex": "the regex", "json_schema": "the JSON schema", "lark": "the Lark grammar"}
_NO_TOKENS = ("NoExtensionBias", "doesn't satisfy the grammar")
"""Parts of llguidance's errors for "no token can follow"."""


# --- The request -------------------------------------------------------------------------


@dataclass(frozen=True)
class Grammar:
    """A grammar's source. Examples: `Grammar("regex", "[ab]+")`,
    `Grammar("json_schema", '{"type": "object"}')`."""

    kind: Literal["regex", "json_schema", "lark"]
    text: str


def parse_structured_output(message: sampler_pb2.StructuredOutput) -> Grammar | None:
    """Return the grammar of a request, or None without one. Raises `StructuredOutputInvalid`."""
    kind = message.WhichOneof("form")
    if kind is None:
        return None
    if kind == "regex" or kind == "json_schema" or kind == "lark":
        text: str = getattr(message, kind)
        _check_size(_NAMES[kind], text, limit=_MOST_BYTES[kind])
        if kind == "json_schema":  # llguidance takes no bare true or false
            text = _BOOLEAN_SCHEMAS.get(text.strip(), text)
        return Grammar(kind, text)
    if kind == "choice":
        choices = list(dict.fromkeys(message.choice.choices))
        if not 1 <= len(choices) <= MAX_CHOICES:
            raise StructuredOutputInvalid(
                f"choice lists {len(choices)} choices; 1 to {MAX_CHOICES} are possible"
            )
        _check_size("choice", "".join(choices), limit=MAX_CHOICES_BYTES)
        return Grammar("regex", "|".join(f"(?:{re.escape(choice)})" for choice in choices))
    if not message.json_object:
        raise StructuredOutputInvalid("json_object is false; leave it out if any text will do")
    return Grammar("json_schema", '{"type": "object"}')


def _check_size(name: str, text: str, *, limit: int) -> None:
    size = len(text.encode())
    if size > limit:
        raise StructuredOutputInvalid(
            f"{name} has {size} bytes; at most {limit} are possible, so shorten it"
        )


# --- Compiling ---------------------------------------------------------------------------


class CompiledGrammar:
    """A grammar compiled for one model's tokens. Each sample starts from a copy.

    Another process compiles `source` again."""

    def __init__(self, source: Grammar, initial: LLMatcher) -> None:
        self.source = source
        self._initial = initial

    def matcher(self) -> LLMatcher:
        return self._initial.deep_copy()


class GrammarCompiler:
    """Compiles grammars in its own threads, and caches the latest.

    Example: `compiler = GrammarCompiler(Path("models/tiny"), vocabulary=96, end_tokens=(1,))`, then
    `await compiler.compile(Grammar("regex", "yes|no"))`."""

    def __init__(
        self,
        model: Path,
        *,
        vocabulary: int,
        end_tokens: tuple[int, ...],
        compile_seconds: float = 10.0,
        load: Callable[[], LLTokenizer] | None = None,
        compile_one: Callable[[Grammar, LLTokenizer], CompiledGrammar] | None = None,
    ) -> None:
        """`compile_seconds` limits one compilation, and its wait for others."""
        self._load = load or partial(
            load_tokenizer, model, vocabulary=vocabulary, end_tokens=end_tokens
        )
        self._compile_one = compile_one or compile_grammar
        self._compile_seconds = compile_seconds
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="grammars")
        self._tokenizer: Future[LLTokenizer] | None = None
        self._cache: OrderedDict[Grammar, CompiledGrammar] = OrderedDict()
        self._compiling: dict[Grammar, asyncio.Task[CompiledGrammar]] = {}
        """Queued or running compilations, also late ones: a thread cannot be ended."""

    async def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Return the compiled grammar. Concurrent callers share the work.

        Raises `StructuredOutputInvalid` if the grammar is at fault, `UnsupportedInput` if the model
        is, and `Overloaded` if earlier grammars keep the threads busy."""
        known = self._cache.get(grammar)
        if known is not None:
            self._cache.move_to_end(grammar)
            return known
        if self._tokenizer is None or (self._tokenizer.done() and self._tokenizer.exception()):
            self._tokenizer = self._threads.submit(self._load)
        loading = asyncio.shield(asyncio.wrap_future(self._tokenizer))
        try:
            tokenizer = await asyncio.wait_for(loading, _TOKENIZER_SECONDS)
        except TimeoutError as error:
            raise Overloaded("the tokenizer is still being loaded; try again") from error
        task = self._compiling.get(grammar)
        if task is None:
            task = asyncio.create_task(self._compile(grammar, tokenizer), name="grammar")
            self._compiling[grammar] = task
        return await asyncio.shield(task)

    async def _compile(self, grammar: Grammar, tokenizer: LLTokenizer) -> CompiledGrammar:
        """Compile in a thread. A wait for the thread does not count."""
        loop, begun = asyncio.get_running_loop(), asyncio.Event()

        def work() -> CompiledGrammar:
            loop.call_soon_threadsafe(begun.set)
            return self._compile_one(grammar, tokenizer)

        def ended(job: asyncio.Future[CompiledGrammar]) -> None:
            del self._compiling[grammar]
            if not job.cancelled():
                job.exception()  # marks the exception as seen

        job = asyncio.wrap_future(self._threads.submit(work))
        job.add_done_callback(ended)
        try:
            await asyncio.wait_for(begun.wait(), self._compile_seconds)
        except TimeoutError as error:
            job.cancel()
            raise Overloaded("other grammars are being compiled; try again") from error
        await asyncio.wait({job}, timeout=self._compile_seconds)
        if not job.done():
            raise StructuredOutputInvalid(
                f"the grammar was not compiled within {self._compile_seconds:g} s; make it simpler"
            )
        compiled = job.result()
        self._cache[grammar] = compiled
        if len(self._cache) > _KEPT_GRAMMARS:
            self._cache.popitem(last=False)
        return compiled


class GrammarCache:
    """Compiles grammars in the engine's process, which a `GrammarCompiler` accepted before."""

    def __init__(self, model: Path) -> None:
        self._load = lru_cache(1)(partial(load_tokenizer, model))
        self._compile = lru_cache(_KEPT_GRAMMARS)(compile_grammar)

    def compile(
        self, grammar: Grammar, *, vocabulary: int, end_tokens: tuple[int, ...]
    ) -> CompiledGrammar:
        return self._compile(grammar, self._load(vocabulary=vocabulary, end_tokens=end_tokens))


def compile_grammar(grammar: Grammar, tokenizer: LLTokenizer) -> CompiledGrammar:
    """Compile a grammar within the budgets above. Raises `StructuredOutputInvalid`."""
    import xgrammar  # noqa: F401 (vLLM applies masks with it; imported here instead of in a step)
    from llguidance import LLMatcher, LLParserLimits

    name = _NAMES[grammar.kind]
    if grammar.kind == "json_schema":
        _check_items(grammar.text)
    if grammar.kind == "lark":
        _check_plain(grammar.text)
    try:
        source = _source_of(grammar)
    except ValueError as error:
        raise StructuredOutputInvalid(
            f"{name} is refused: {on_one_line(describe(error))}"
        ) from error
    limits = LLParserLimits(
        initial_lexer_fuel=_BUILD_FUEL,
        step_lexer_fuel=_STEP_FUEL,
        step_max_items=_STEP_ITEMS,
        max_lexer_states=_LEXER_STATES,
        max_grammar_size=_GRAMMAR_SIZE,
        verbose_errors=False,
    )
    matcher = LLMatcher(tokenizer, source, log_level=0, limits=limits)
    if matcher.is_error():
        raise StructuredOutputInvalid(f"{name} is refused: {on_one_line(matcher.get_error())}")
    _probe(matcher, name=name, vocabulary=tokenizer.vocab_size)
    return CompiledGrammar(grammar, matcher)


def _source_of(grammar: Grammar) -> str:
    """Return a grammar in llguidance's form. Raises `ValueError`."""
    from llguidance import LLMatcher

    if grammar.kind == "regex":
        return LLMatcher.grammar_from_regex(grammar.text)
    if grammar.kind == "json_schema":
        schema = rewrite_schema(grammar.text)
        return LLMatcher.grammar_from_json_schema(schema, overrides={"lenient": False})
    # `grammar_from_lark` would read a text that begins with { as grammars in JSON.
    return json.dumps({"grammars": [{"lark_grammar": grammar.text}]})


def _check_plain(lark: str) -> None:
    """Raise `StructuredOutputInvalid` if a Lark grammar contains another one.

    A JSON schema there would escape `_check_items`."""
    for sign in _OTHER_GRAMMARS:
        if sign in lark:
            raise StructuredOutputInvalid(
                f"the Lark grammar contains {sign}, which is not offered there; ask for a JSON "
                'schema instead, or split the sign into two texts after its "%"'
            )


def _check_items(schema: str) -> None:
    """Raise `StructuredOutputInvalid` if a schema's arrays may have too many items in total.

    llguidance makes a symbol per item before it checks the size: 2⁴⁰ would take all memory."""
    items = 0.0

    def add(pairs: list[tuple[str, object]]) -> None:  # also sees repeated names
        nonlocal items
        items += sum(
            value
            for key, value in pairs
            if key in ("minItems", "maxItems") and isinstance(value, float)
        )

    try:
        json.loads(schema, strict=False, object_pairs_hook=add, parse_int=float)
    except (ValueError, RecursionError) as error:
        raise StructuredOutputInvalid(
            f"the JSON schema is refused: {on_one_line(describe(error))}"
        ) from error
    if not items <= _MOST_ITEMS:
        raise StructuredOutputInvalid(
            f"the JSON schema is too large: its minItems and maxItems add up to {items:g}; at most "
            f"{_MOST_ITEMS} are possible"
        )


def _probe(matcher: LLMatcher, *, name: str, vocabulary: int) -> None:
    """Follow a grammar for a few tokens. Most grammars above the budget fail at once."""
    import llguidance.numpy

    probe = matcher.deep_copy()
    mask = llguidance.numpy.allocate_token_bitmask(1, vocabulary)
    for _ in range(_PROBED_TOKENS):
        llguidance.numpy.fill_next_token_bitmask(probe, mask, 0)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        if probe.is_stopped() and not probe.is_error():
            return
        error = probe.get_error()
        if not len(allowed) or any(sign in error for sign in _NO_TOKENS):
            raise StructuredOutputInvalid(f"{name} asks for text that the model has no tokens for")
        if probe.is_error():
            raise StructuredOutputInvalid(f"{name} is too large: {on_one_line(error)}")
        probe.consume_token(int(allowed[0]))


def on_one_line(message: str) -> str:
    """Return an error of llguidance without line breaks and markers."""
    lines = [line.strip() for line in message.splitlines()]
    shown = [line for line in lines if line and line != "<non-verbose/>" and set(line) != {"^"}]
    return " ".join(shown)[:500]


# --- The model's tokens ------------------------------------------------------------------


def load_tokenizer(model: Path, *, vocabulary: int, end_tokens: tuple[int, ...]) -> LLTokenizer:
    """Load a model's tokens as bytes, for llguidance. Raises `UnsupportedInput`."""
    from llguidance import LLTokenizer
    from llguidance._tokenizer import TokenizerWrapper
    from tokenizers import Tokenizer

    if not end_tokens:
        raise UnsupportedInput("structured output needs a model with an end token")
    file = model / "tokenizer.json"
    if not file.is_file():
        raise UnsupportedInput("structured output needs the model's tokenizer: no tokenizer.json")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        raise UnsupportedInput(
            "structured output needs the model's tokenizer, which does not load: "
            f"{without_paths(describe(error))}"
        ) from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    build = partial(LLTokenizer, n_vocab=vocabulary, eos_token=list(end_tokens))
    try:
        return build(tokenizer.to_str())
    except ValueError:  # llguidance reads only tokenizers with byte-level or byte tokens
        plain = _PlainTokens(tokenizer, vocabulary=vocabulary, end_tokens=end_tokens)
        return build(TokenizerWrapper(plain))


class _PlainTokens:
    """The attributes that llguidance reads from a tokenizer with plain-text tokens."""

    def __init__(
        self, tokenizer: Tokenizer, *, vocabulary: int, end_tokens: tuple[int, ...]
    ) -> None:
        added = tokenizer.get_added_tokens_decoder()
        special = {id_ for id_, token in added.items() if token.special} | set(end_tokens)
        model = json.loads(tokenizer.to_str())["model"]
        unknown = {model.get("unk_id"), tokenizer.token_to_id(model.get("unk_token") or "")}
        text = set(tokenizer.get_vocab().values()) - special - unknown
        self.eos_token_id = end_tokens[0]
        self.bos_token_id = None
        self.tokens = [
            tokenizer.decode([id_]).encode() if id_ in text else f"<|{id_}|>".encode()
            for id_ in range(vocabulary)
        ]
        self.special_token_ids = [id_ for id_ in range(vocabulary) if id_ not in text]
        self._text = text
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> Sequence[int]:
        """Tokenize a text up to the first part without a token."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return list(takewhile(self._text.__contains__, ids))
