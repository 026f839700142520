"""Text to tokens and back: a model's tokenizer, and decoding as tokens arrive.

`tokenizers` computes what `transformers` computes, from the same `tokenizer.json`; the files
beside it say which tokens are special and which end a sequence.
"""

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
from gateway.api.openai.schemas import Json
from tandem.errors import InvalidRequest, SequenceTooLong, UnsupportedInput, describe, without_paths
from tandem.weights.model_config import end_tokens, read_json

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")
_MAX_CHARACTERS_PER_TOKEN = 256

_REPLACEMENT = "\ufffd"
"""What a tokenizer decodes the bytes of an incomplete character to."""

_MAX_CHARACTER = 4
"""Bytes, and so tokens, in one character."""

_MAX_HELD = 32
"""Tokens held back for the rest of a character. No character has as many: this is noise."""


@dataclass(frozen=True)
class TokenText:
    """The text and the bytes of one token. `text` has U+FFFD for a part of a character."""

    text: str
    raw: bytes


class ModelTokenizer:
    """Encodes and decodes text, and holds the model's chat template, all read from its folder.
    Thread-safe. Raises `UnsupportedInput`, which says what the folder lacks."""

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
        special = [t.content for t in tokenizer.get_added_tokens_decoder().values() if t.special]
        ids = [tokenizer.token_to_id(token) for token in {*special, *named.values()}]
        self.special = frozenset(id_ for id_ in ids if id_ is not None)
        self._anchor = tokenizer.encode("a", add_special_tokens=False).ids[-1:]
        self._anchor_text = self.decode(self._anchor)
        self.token = cache(self._token)

    def encode(
        self, text: str, *, add_special_tokens: bool, max_length: int | None = None
    ) -> list[int]:
        """Return the token ids of a text. Raises `SequenceTooLong` for a text that cannot fit into
        `max_length` tokens, and `InvalidRequest` for invalid Unicode."""
        if max_length is not None and len(text) > _MAX_CHARACTERS_PER_TOKEN * max_length:
            raise SequenceTooLong(
                f"the prompt has {len(text)} characters; the model's length is {max_length} tokens"
            )
        try:
            return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)
        except (UnicodeEncodeError, TypeError) as error:  # half a surrogate pair is no text
            raise InvalidRequest(f"the prompt is not valid Unicode: {describe(error)}") from error

    def offsets(self, text: str, *, add_special_tokens: bool) -> Sequence[int]:
        """Return where each token of `encode` begins in the text, in characters. A token that is a
        part of a character begins where the character does. A blank before a token, which some
        tokenizers leave out, is the token's."""
        encoding = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        offsets, end = [], 0
        for (first, last), added in zip(
            encoding.offsets, encoding.special_tokens_mask, strict=True
        ):
            offsets.append(end if added else min(first, end))
            end = end if added else max(end, last)
        return offsets

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of the tokens, special tokens included."""
        return self._tokenizer.decode(list(tokens), skip_special_tokens=False)

    def decode_within_text(self, tokens: Sequence[int]) -> str:
        """Return the text that the tokens add after other text: at the beginning of a text, some
        tokenizers drop a blank."""
        return self.decode([*self._anchor, *tokens]).removeprefix(self._anchor_text)

    def decode_next(self, stream: DecodeStream, tokens: Sequence[int]) -> str | None:
        """Return the text that the tokens add to a stream, None while it may end within a
        character, or U+FFFD if the stream cannot go on from what it has decoded."""
        try:
            return stream.step(self._tokenizer, list(tokens))
        except Exception:  # noqa: BLE001 - "invalid prefix"; `tokenizers` raises nothing narrower
            return _REPLACEMENT

    def chat_template(self) -> ChatTemplate:
        """Raise `UnsupportedInput` for a model without one."""
        if self._template is None:
            raise UnsupportedInput(
                f"the model {self.name!r} has no chat template; put a chat_template.jinja into its "
                "folder and add the model again, or use /v1/completions with a prompt of your own"
            )
        return self._template

    def _token(self, id_: int) -> TokenText | None:
        """Return one token as it reads within a text, None for a row of the model's vocabulary
        that is no token."""
        piece = self._tokenizer.id_to_token(id_)
        if piece is None:
            return None
        if id_ in self.special:
            return TokenText(text=piece, raw=piece.encode())
        text = self.decode_within_text([id_])
        raw = text.encode()
        if _REPLACEMENT in text:  # a part of a character: `<0xE2>`, or a character for each byte
            if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
                raw = bytes([int(piece[3:5], 16)])
            elif all(character in _BYTES for character in piece):
                raw = bytes(_BYTES[character] for character in piece)
        return TokenText(text=text, raw=raw)


class Detokenizer:
    """Decodes with the `DecodeStream` of `tokenizers`, which holds tokens back until they end a
    character. What it lacks is here: an end, a bound on what it holds back, and prompts that end
    within a character, which the sampled tokens then complete. `context` are the last tokens of
    the prompt. The text is the same however the tokens are divided.

    `silent` tokens have no text. `places` says where each token begins in the text, in characters,
    as far as that is known: it is not of tokens that are held back."""

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
        """Of each token without a place: the held text before it, and whether it has text."""
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
        """Return the text that is certain with these tokens."""
        return "".join(map(self._push, tokens))

    def finish(self) -> str:
        """Return the text of the tokens held back, with U+FFFD for incomplete characters."""
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
        """Place the tokens whose text this is; return what of it is not the prompt's. What a token
        leaves of the held text before it was there before; one that adds no character is a part of
        the last."""
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
        """Drop what the first text repeats of the prompt's last, incomplete token."""
        prompt_text, self._prompt_text = self._prompt_text, ""
        return text[_shared_length(prompt_text, text) :]


def offsets_of(tokens: Sequence[int], tokenizer: ModelTokenizer, text: str) -> list[int]:
    """Return where each token begins in the text that the tokens are decoded to."""
    detokenizer = Detokenizer(tokenizer, context=(), skip_special_tokens=False)
    detokenizer.push(tokens)
    detokenizer.finish()
    return [min(place, len(text)) for place in detokenizer.places]


class StopCutter:
    """Ends a text before the first of its stop strings (with `keep`: after it), and holds back
    what may be the beginning of one."""

    def __init__(self, stops: Sequence[str], *, keep: bool = False) -> None:
        self._stops = stops
        self._keep = keep
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """Return the text that is certain with this text."""
        if self.stopped:
            return ""
        self._held += text
        ends = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if ends:  # the stop string that ends first counts; of several, the longest
            end, begin = min(ends)
            self.stopped = True
            return self._release(end if self._keep else begin)
        return self._release(len(self._held) - max(map(self._overlap, self._stops), default=0))

    def finish(self) -> str:
        """Return what was held back."""
        return "" if self.stopped else self._release(len(self._held))

    def _release(self, length: int) -> str:
        released, self._held = self._held[:length], self._held[length:]
        return released

    def _overlap(self, stop: str) -> int:
        """Return how many characters at the end may be the beginning of the stop string."""
        sizes = range(min(len(stop) - 1, len(self._held)), 0, -1)
        return next((size for size in sizes if self._held.endswith(stop[:size])), 0)


def _shared_length(one: str, other: str) -> int:
    """Return how many characters two texts begin with together."""
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _named_tokens(config: Json) -> dict[str, str]:
    """Return the special tokens by name, `{"eos_token": "<|im_end|>"}`."""
    values = ((name, config.get(name)) for name in _SPECIAL_NAMES)
    named = ((name, one.get("content") if isinstance(one, dict) else one) for name, one in values)
    return {name: token for name, token in named if isinstance(token, str)}


def _byte_alphabet() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary (GPT-2's) stands for:
    printable bytes are themselves, the others are the characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_BYTES = _byte_alphabet()
