"""A trace: recorded turns, the turn that a request continues, and the sequences for training.

Turns form a tree, because an agent may repeat a request or call sub-agents. A turn has the tokens
since its parent. So nothing is stored or tokenised twice."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import nan

import orjson

Message = dict[str, object]

_TURN_BYTES = 1000
_VERSION_BYTES = 200


@dataclass(frozen=True)
class RecordedVersion:
    """Consecutive tokens from one weight version of an optimizer step."""

    version: str
    step: int
    tokens: int


@dataclass(frozen=True, kw_only=True)
class RecordedTurn:
    """One answer. `parent` is the number of the turn that it continues, or None. `prompt` are the
    token ids between the parent's last token and the answer. `tokens` and `logprobs` are the
    sampled ones. `messages` are the JSON of the list of new messages since the parent, the answer
    last: objects would take a multiple of its memory. `digest` identifies the conversation with the
    answer."""

    parent: int | None
    prompt: Sequence[int]
    tokens: Sequence[int]
    logprobs: Sequence[float]
    versions: Sequence[RecordedVersion]
    messages: bytes
    digest: bytes
    stop_reason: str

    @property
    def size(self) -> int:
        """About the bytes of memory."""
        numbers = 4 * (len(self.prompt) + len(self.tokens) + len(self.logprobs))
        return numbers + len(self.messages) + _VERSION_BYTES * len(self.versions) + _TURN_BYTES


@dataclass(frozen=True, kw_only=True)
class TrainingSequence:
    """A conversation from its first message to an answer that no turn continues.

    `tokens` are all its ids. The other lists have one entry for each token. `logprobs` are 0 and
    `steps` None for tokens that the model did not sample. `mask` is 1 for sampled tokens that no
    earlier sequence of the trace has."""

    turns: Sequence[int]
    tokens: Sequence[int]
    logprobs: Sequence[float]
    mask: Sequence[int]
    steps: Sequence[int | None]
    versions: Sequence[tuple[int, RecordedVersion]]
    messages: Sequence[Message]


class Digests:
    """The identity of each beginning of a request's messages. `digests[n]` is that of its first `n`
    messages, together with everything else that the template shows, such as the tools."""

    def __init__(self, messages: Sequence[Message], shown: object) -> None:
        self._chain = [_digest(b"", shown)]
        for message in messages:
            self._chain.append(self.after(message))

    def __len__(self) -> int:
        return len(self._chain)

    def __getitem__(self, count: int) -> bytes:
        return self._chain[count]

    def after(self, message: Message) -> bytes:
        """Return the identity of all messages and one more."""
        return _digest(self._chain[-1], _identity(message))


class Conversations:
    """The turns of one trace, in order of their numbers."""

    def __init__(self) -> None:
        self.turns: list[RecordedTurn] = []
        self.size = 0
        """About the bytes of memory."""
        self._newest: dict[bytes, int] = {}

    def add_turn(self, turn: RecordedTurn) -> None:
        self._newest[turn.digest] = len(self.turns)
        self.turns.append(turn)
        self.size += turn.size

    def find_parent(self, digests: Digests) -> tuple[int, int] | None:
        """Return the number of the longest recorded conversation that a request begins with, and
        its number of messages."""
        for count in range(len(digests) - 1, 0, -1):
            if (number := self._newest.get(digests[count])) is not None:
                return number, count
        return None

    def tokens_of(self, number: int) -> list[int]:
        """Return all token ids of a conversation, up to the turn's answer."""
        found: list[int] = []
        for turn in self._path(number):
            found += turn.prompt
            found += turn.tokens
        return found

    def sequences(self) -> Iterator[TrainingSequence]:
        """Yield a sequence for each present turn without successor. Each sampled token has the mask
        1 in one of them."""
        count = len(self.turns)
        parents = {turn.parent for turn in self.turns[:count]}
        trained: set[int] = set()
        for number in range(count):
            if number not in parents:
                yield self._sequence(number, trained)

    def _sequence(self, last: int, trained: set[int]) -> TrainingSequence:
        tokens: list[int] = []
        logprobs: list[float] = []
        mask: list[int] = []
        steps: list[int | None] = []
        versions: list[tuple[int, RecordedVersion]] = []
        messages: list[Message] = []
        numbers = self._numbers(last)
        for number in numbers:
            turn = self.turns[number]
            before, sampled = len(turn.prompt), len(turn.tokens)
            at = len(tokens) + before
            for run in turn.versions:
                versions.append((at, run))
                at += run.tokens
            tokens += [*turn.prompt, *turn.tokens]
            logprobs += [*[0.0] * before, *turn.logprobs]
            mask += [*[0] * before, *[int(number not in trained)] * sampled]
            steps += [*[None] * before, *(r.step for r in turn.versions for _ in range(r.tokens))]
            messages += json.loads(turn.messages)
            trained.add(number)
        return TrainingSequence(
            turns=numbers,
            tokens=tokens,
            logprobs=logprobs,
            mask=mask,
            steps=steps,
            versions=versions,
            messages=messages,
        )

    def _path(self, number: int) -> Iterator[RecordedTurn]:
        return (self.turns[each] for each in self._numbers(number))

    def _numbers(self, last: int) -> list[int]:
        numbers: list[int] = []
        at: int | None = last
        while at is not None:
            numbers.append(at)
            at = self.turns[at].parent
        return numbers[::-1]


def encode_messages(messages: Sequence[Message]) -> bytes:
    """Return JSON. Unlike orjson, this writes numbers of any size."""
    return json.dumps(messages).encode()


def encode_turn(turn: RecordedTurn) -> bytes:
    """Return a line of the trace's file."""
    return orjson.dumps(
        {
            "parent": turn.parent,
            "prompt": list(turn.prompt),
            "tokens": list(turn.tokens),
            "logprobs": list(turn.logprobs),
            "versions": [[run.version, run.step, run.tokens] for run in turn.versions],
            "messages": orjson.Fragment(turn.messages),
            "digest": turn.digest.hex(),
            "stop_reason": turn.stop_reason,
        },
        option=orjson.OPT_APPEND_NEWLINE,
    )


def decode_turn(line: bytes) -> RecordedTurn:
    fields = json.loads(line)
    return RecordedTurn(
        parent=fields["parent"],
        prompt=array("i", fields["prompt"]),
        tokens=array("i", fields["tokens"]),
        # JSON has no NaN, which broken weights give.
        logprobs=array("f", [nan if each is None else each for each in fields["logprobs"]]),
        versions=[RecordedVersion(*run) for run in fields["versions"]],
        messages=encode_messages(fields["messages"]),
        digest=bytes.fromhex(fields["digest"]),
        stop_reason=fields["stop_reason"],
    )


def _identity(message: Message) -> object:
    """Return the parts of a message that a client repeats unchanged. Ids, reasoning, empty fields
    and the space around an answer differ between clients."""
    content = message.get("content") or ""
    if isinstance(content, list):
        parts = [part if isinstance(part, dict) else {} for part in content]
        content = "\n".join(str(part.get(str(part.get("type")), part)) for part in parts)
    if message.get("role") != "assistant":
        return message.get("role"), content, message.get("name")
    calls = message.get("tool_calls")
    functions = [_function(call) for call in calls] if isinstance(calls, list) else []
    return "assistant", str(content).strip(), functions


def _function(call: object) -> object:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, Mapping):
        return call
    arguments = function.get("arguments") or {}
    with suppress(ValueError, RecursionError):
        found = json.loads(arguments) if isinstance(arguments, str) else arguments
        arguments = json.dumps(found, sort_keys=True)
    return function.get("name"), arguments


def _digest(before: bytes, value: object) -> bytes:
    text = json.dumps(value, sort_keys=True)
    return hashlib.blake2b(before + text.encode(), digest_size=16).digest()
