"""A model's tokenizer, and decoding of arriving tokens.

`tokenizers` gives the results of `transformers` from `tokenizer.json`. The files beside it name the
special tokens and the end tokens."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from gateway.api.openai.chat_template import ChatTemplate, find_template
from gateway.api.openai.parsing import Parsers
from gateway.api.openai.schemas import Json
from tandem.errors import InvalidRequest, SequenceTooLong, UnsupportedInput, describe, without_paths
from tandem.weights.model_config import end_tokens, read_json

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")
_MAX_CHARACTERS_PER_TOKEN = 256

_REPLACEMENT = "\ufffd"
"""The decoded bytes of an incomplete character."""

_MAX_CHARACTER = 4

_MAX_HELD = 32
"""Tokens held back for the rest of a character. More are noise."""


@dataclass(frozen=True)
class TokenText:
    """One token's text and bytes. `text` has U+FFFD for a part of a character."""

    text: str
    raw: bytes


class ModelTokenizer:
    """A model's tokenizer and chat template, read from its folder. Thread-safe. Raises
    `UnsupportedInput` for missing or unreadable files."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise UnsupportedInput(
                f"the model {name!r} has no tokenizer.json, so it accepts no text; transformers "
                "writes one into its folder (AutoTokenizer.from_pretrained(…).save_pretrained(…))"
            )
        try:
            self._tokenizer = tokenizer = Tokenizer.from_file(str(path))
            config = read_json(folder / "tokenizer_config.json")
            older = read_json(folder / "special_tokens_map.json")
            named = _named_tokens(older) | _named_tokens(config)
            source = find_template(folder, config)
            self.end_tokens = end_tokens(folder)
        except Exception as error:  # `tokenizers` raises nothing narrower
            raise UnsupportedInput(
                f"the tokenizer of the model {name!r} cannot be read: "
                f"{without_paths(describe(error))}"
            ) from error
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._template = ChatTemplate(source, special_tokens=named) if source else None
        self.parsers = Parsers.of_template(str(source))
        special = [t.content for t in tokenizer.get_added_tokens_decoder().values() if t.special]
        ids = [tokenizer.token_to_id(token) for token in {*special, *named.values()}]
        self.special = frozenset(id_ for id_ in ids if id_ is not None)
        self._anchor = tokenizer.encode("a", add_special_tokens=False).ids[-1:]
        self._anchor_text = self.decode(self._anchor)
        self.token = cache(self._token)

    def encode(
        self, text: str, *, add_special_tokens: bool, max_length: int | None = None
    ) -> list[int]:
        """Return a text's token ids. Raises `SequenceTooLong` for a text that cannot fit into
        `max_length`, and `InvalidRequest` for invalid Unicode."""
        if max_length is not None and len(text) > _MAX_CHARACTERS_PER_TOKEN * max_length:
            raise SequenceTooLong(
                f"the prompt has {len(text)} characters; the model's length is {max_length} tokens"
            )
        try:
            return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)
        except (UnicodeEncodeError, TypeError) as error:  # half a surrogate pair is no text
            raise InvalidRequest(f"the prompt is not valid Unicode: {describe(error)}") from error

    def offsets(self, text: str, *, add_special_tokens: bool) -> Sequence[int]:
        """Return the character position of each token of `encode`. A part of a character begins
        where the character does. A blank before a token belongs to it."""
        encoding = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        offsets, end = [], 0
        for (first, last), added in zip(
            encoding.offsets, encoding.special_tokens_mask, strict=True
        ):
            offsets.append(end if added else min(first, end))
            end = end if added else max(end, last)
        return offsets

    def decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(list(tokens), skip_special_tokens=False)

    def decode_within_text(self, tokens: Sequence[int]) -> str:
        """Return the tokens' text after other text. At the beginning of a text, some tokenizers
        drop a blank."""
        return self.decode([*self._anchor, *tokens]).removeprefix(self._anchor_text)

    def decode_next(self, stream: DecodeStream, tokens: Sequence[int]) -> str | None:
        """Return the text that the tokens add to a stream, None within a character, or U+FFFD if it
        cannot continue."""
        try:
            return stream.step(self._tokenizer, list(tokens))
        except Exception:  # noqa: BLE001 - "invalid prefix"; `tokenizers` raises nothing narrower
            return _REPLACEMENT

    def chat_template(self) -> ChatTemplate:
        """Return the chat template. Raises `UnsupportedInput` without one."""
        if self._template is None:
            raise UnsupportedInput(
                f"the model {self.name!r} has no chat template; put a chat_template.jinja into its "
                "folder and add the model again, or use /v1/completions (`tandem chat --complete`) "
                "with a prompt of your own"
            )
        return self._template

    def _token(self, id_: int) -> TokenText | None:
        """Return a token as it reads within a text, None for an id without a token."""
        piece = self._tokenizer.id_to_token(id_)
        if piece is None:
            return None
        if id_ in self.special:
            return TokenText(text=piece, raw=piece.encode())
        text = self.decode_within_text([id_])
        raw = text.encode()
        if _REPLACEMENT in text:  # a part of a character: `<0xE2>`, or a character per byte
            if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
                raw = bytes([int(piece[3:5], 16)])
            elif all(character in _BYTES for character in piece):
                raw = bytes(_BYTES[character] for character in piece)
        return TokenText(text=text, raw=raw)


class Detokenizer:
    """Decodes with the `DecodeStream` of `tokenizers`, which holds tokens back until a character is
    complete. This class adds an end, a bound on held tokens, and prompts that end within a
    character. `context` are the prompt's last tokens.

    `silent` tokens have no text. `places` has the character position of each token that is not held
    back."""

    def __init__(
        self,
        tokenizer: ModelTokenizer,
        *,
        context: Sequence[int],
        skip_special_tokens: bool,
        silent: AbstractSet[int] = frozenset(),
    ) -> None:
        self._tokenizer = tokenizer
        special = tokenizer.special if skip_special_tokens else frozenset[int]()
        self._skipped = special | silent
        self._held: list[int] = []
        self._unplaced: list[tuple[str, bool]] = []
        """Tokens without a place: the held text before each, and whether it has text."""
        self._length = 0
        self.places: list[int] = []
        known = [token for token in context if token not in special]
        whole = len(known)
        while whole and tokenizer.decode(known[:whole]).endswith(_REPLACEMENT):
            whole -= 1
        begun = known[whole:][-_MAX_CHARACTER:]
        self._stream = DecodeStream(ids=known[:whole])
        self._prompt_text = ""
        self.push(begun)
        self._prompt_text = tokenizer.decode_within_text(self._held)
        self._unplaced, self._length, self.places = [], 0, []

    def push(self, tokens: Sequence[int]) -> str:
        return "".join(map(self._push, tokens))

    def finish(self) -> str:
        """Return the held tokens' text, with U+FFFD for incomplete characters."""
        held, self._held = self._held, []
        self._stream = DecodeStream(ids=held)
        return self._placed(self._tokenizer.decode_within_text(held))

    def _push(self, token: int) -> str:
        before = self._tokenizer.decode_within_text(self._held) if self._held else ""
        skipped = token in self._skipped
        self._unplaced.append((before, not skipped))
        if skipped:
            return "" if self._held else self._placed("")
        self._held.append(token)
        text = self._tokenizer.decode_next(self._stream, [token])
        if text is None and len(self._held) < _MAX_HELD:
            return ""
        if text is None or text == _REPLACEMENT:
            return self.finish()
        self._held = []
        return self._placed(text)

    def _placed(self, whole: str) -> str:
        """Place the tokens of this text and return its part after the prompt. A token begins after
        the text shared with the held text. One without new characters belongs to the last
        character."""
        text = self._without_prompt(whole)
        of_prompt = len(whole) - len(text)
        following = [*(before for before, _ in self._unplaced), whole][1:]
        for (before, spoken), after in zip(self._unplaced, following, strict=True):
            place = _shared_length(before, whole)
            if spoken and 0 < place == len(before) and after == before:
                place -= 1
            self.places.append(self._length + max(0, place - of_prompt))
        self._unplaced = []
        self._length += len(text)
        return text

    def _without_prompt(self, text: str) -> str:
        prompt_text, self._prompt_text = self._prompt_text, ""
        return text[_shared_length(prompt_text, text) :]


def offsets_of(tokens: Sequence[int], tokenizer: ModelTokenizer, text: str) -> list[int]:
    detokenizer = Detokenizer(tokenizer, context=(), skip_special_tokens=False)
    detokenizer.push(tokens)
    detokenizer.finish()
    return [min(place, len(text)) for place in detokenizer.places]


class StopCutter:
    """Ends a text before its first stop string (with `keep`: after it), and holds back a possible
    beginning."""

    def __init__(self, stops: Sequence[str], *, keep: bool = False) -> None:
        self._stops = stops
        self._keep = keep
        self._held = ""
        self.stop = ""
        """The stop string that ended the text."""

    @property
    def stopped(self) -> bool:
        return bool(self.stop)

    def push(self, text: str) -> str:
        if self.stopped:
            return ""
        self._held += text
        places = ((self._held.find(stop), stop) for stop in self._stops)
        ends = [(at + len(stop), at, stop) for at, stop in places if at >= 0]
        if ends:  # the first to end counts, of several the longest
            end, begin, self.stop = min(ends)
            return self._release(end if self._keep else begin)
        return self._release(len(self._held) - max(map(self._overlap, self._stops), default=0))

    def finish(self) -> str:
        return "" if self.stopped else self._release(len(self._held))

    def _release(self, length: int) -> str:
        released, self._held = self._held[:length], self._held[length:]
        return released

    def _overlap(self, stop: str) -> int:
        sizes = range(min(len(stop) - 1, len(self._held)), 0, -1)
        return next((size for size in sizes if self._held.endswith(stop[:size])), 0)


def _shared_length(one: str, other: str) -> int:
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _named_tokens(config: Json) -> dict[str, str]:
    """Return the special tokens by name, `{"eos_token": "<|im_end|>"}`."""
    values = ((name, config.get(name)) for name in _SPECIAL_NAMES)
    named = ((name, one.get("content") if isinstance(one, dict) else one) for name, one in values)
    return {name: token for name, token in named if isinstance(token, str)}


def _byte_alphabet() -> dict[str, int]:
    """Map the characters of a byte-level vocabulary (GPT-2's) to bytes: printable bytes to
    themselves, others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_BYTES = _byte_alphabet()
