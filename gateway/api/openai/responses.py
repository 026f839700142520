"""Converts sampled tokens into whole or streamed responses with text, logprobs and usage."""

from __future__ import annotations

import math
import secrets
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple, cast

import orjson

from gateway.api.openai.parsing import forced_message, forced_tool, tool_call
from gateway.api.openai.prompts import PreparedPrompt
from gateway.api.openai.schemas import ChatCompletionRequest, FinishReason, InferenceRequest, Json
from gateway.api.openai.tokenizer import Detokenizer, ModelTokenizer, StopCutter
from tandem.v1 import sampler_pb2
from tandem.wire.v1 import tinker_pb2

Stage = Literal["whole", "opening", "part"]
"""The written part of a choice: all, or a part of a stream."""

Alternatives = Sequence[tuple[int, float]]

_NO_ALTERNATIVE = -99999.0
"""The logprob of an empty cell in the wire protocol's matrix."""

_MIN_LOGPROB = -9999.0
"""Replaces minus infinity, which JSON lacks."""


@dataclass(frozen=True)
class NewTokens:
    """New tokens of one sample, with logprobs and requested alternatives. `finish` comes with the
    last tokens. `versions` are set for a whole in-flight sample. `message` is the parsed message,
    or the part that a stream adds to it, as JSON."""

    ids: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    alternatives: Sequence[Alternatives] = ()
    finish: FinishReason | None = None
    versions: Sequence[tinker_pb2.TandemVersionRun] = ()
    message: str = ""

    @staticmethod
    def of_sample(
        sample: tinker_pb2.SampledSequence | sampler_pb2.SampleDelta,
        topk: tinker_pb2.TopkLogprobs,
        *,
        finished: bool = True,
    ) -> NewTokens:
        length = sample.stop_reason == tinker_pb2.STOP_REASON_LENGTH
        ids = array("i", sample.tokens)
        return NewTokens(
            ids=ids,
            logprobs=array("f", sample.logprobs),
            alternatives=_alternatives(topk, count=len(ids)),
            finish=("length" if length else "stop") if finished else None,
            versions=getattr(sample, "tandem_versions", ()),
            message=sample.tandem_message,
        )


class Position(NamedTuple):
    """A token with its `offset`, the character position in its choice's text. A prompt's first
    token has no logprob."""

    token: int
    logprob: float | None
    alternatives: Alternatives
    offset: int


class Choice:
    """One choice of a completion. Tokens become text as they arrive. `new_text` is the newest text,
    which may lag behind. Stop tokens and strings are in the text only with
    `include_stop_str_in_output`. `shown` are the newest shown tokens. With offsets, a token waits
    until no stop string can end the text before it."""

    has_offsets: ClassVar[bool] = True

    def __init__(
        self,
        request: InferenceRequest,
        *,
        index: int,
        prompt: PreparedPrompt,
        params: sampler_pb2.SamplingParams,
        tokenizer: ModelTokenizer,
    ) -> None:
        self.new_text = ""
        self.finish: FinishReason | None = None
        self.shown: Sequence[Position] = ()
        self._request = request
        self._index = index
        self._prompt = prompt
        self._tokenizer = tokenizer
        self._text_length = len(prompt.text or "") if request.echo else 0
        self._text_start = self._text_length
        self._waiting: list[Position] = []
        keep_stop = request.include_stop_str_in_output
        self._cutter = StopCutter(params.stop_strings, keep=keep_stop)
        self._detokenizer = Detokenizer(
            tokenizer,
            context=prompt.token_ids[-16:],
            skip_special_tokens=request.skip_special_tokens,
            silent=frozenset() if keep_stop else frozenset(params.stop_token_ids),
        )

    @property
    def has_news(self) -> bool:
        """Whether the newest tokens have text to show."""
        return bool(self.new_text)

    @property
    def stop_string(self) -> str:
        """The stop string that ended the text, or ""."""
        return self._cutter.stop

    def write_tokens(
        self,
        tokens: NewTokens,
        stage: Stage,
        sample: tinker_pb2.SampleResponse | None = None,
    ) -> Json:
        """Add the tokens and return their part of the response. `sample` is set for a whole
        response."""
        self._add(tokens)
        self.shown = self._take_certain()
        shows_logprobs = self._request.alternatives is not None and stage != "opening"
        written: Json = {
            "index": self._index,
            **self._content(stage),
            "logprobs": self._logprobs(sample) if shows_logprobs else None,
            "finish_reason": self.finish,
        }
        if self._request.return_token_ids:
            written["token_ids"] = [position.token for position in self.shown]
            if stage != "part":
                written["prompt_token_ids"] = list(self._prompt.token_ids)
        if tokens.versions:
            names = ("version", "step", "tokens")
            written["tandem_versions"] = [
                {name: getattr(run, name) for name in names} for run in tokens.versions
            ]
        return written

    def _add(self, tokens: NewTokens) -> None:
        places = zip(tokens.ids, tokens.logprobs, tokens.alternatives, strict=True)
        self._waiting += [Position(*place, offset=0) for place in places]
        self.new_text = self._cutter.push(self._detokenizer.push(tokens.ids))
        if tokens.finish is not None:
            self.new_text += self._cutter.push(self._detokenizer.finish()) + self._cutter.finish()
            self.finish = "stop" if self._cutter.stopped else tokens.finish
        self._text_length += len(self.new_text)

    def _take_certain(self) -> Sequence[Position]:
        """Return the waiting tokens with a certain place, at the end all of them."""
        if not self.has_offsets or self._request.alternatives is None:
            certain, self._waiting = self._waiting, []
            return certain
        places, end = self._detokenizer.places, self._text_length
        offsets = [self._text_start + place for place in places]
        count = sum(self.finish is not None or offset <= end for offset in offsets)
        certain = [
            position._replace(offset=min(offset, end))
            for position, offset in zip(self._waiting[:count], offsets[:count], strict=True)
        ]
        del self._waiting[:count], places[:count]
        return certain

    def _content(self, stage: Stage) -> Json:
        if not self._request.echo or stage == "part":
            return {"text": self.new_text}
        return {"text": (self._prompt.text or "") + self.new_text}

    def _logprobs(self, sample: tinker_pb2.SampleResponse | None) -> Json:
        shown = self.shown
        if sample is not None and self._request.echo:
            prompt = self._prompt.token_ids
            logprobs: list[float | None] = [None, *array("f", sample.prompt_logprobs)[1:]]
            rows = _alternatives(sample.topk_prompt_logprobs, count=len(prompt))
            places = zip(prompt, logprobs, rows, self._prompt.offsets, strict=True)
            shown = [*(Position(*place) for place in places), *shown]
        return {
            "tokens": [self._token_name(position.token) for position in shown],
            "token_logprobs": [
                None if position.logprob is None else _json_number(position.logprob)
                for position in shown
            ],
            "top_logprobs": [self._top(p) for p in shown] if self._request.alternatives else None,
            "text_offset": [position.offset for position in shown],
        }

    def _top(self, position: Position) -> Json | None:
        """Return the likeliest tokens and the sampled one. Of several with one name, the sampled or
        likeliest keeps it, and the others are named by id."""
        if position.logprob is None:
            return None
        own = self._token_name(position.token)
        found: Json = {}
        for token, logprob in position.alternatives[: self._request.alternatives]:
            name = self._token_name(token)
            if token != position.token and (name == own or name in found):
                name = _id_name(token)
            found[name] = _json_number(logprob)
        found.setdefault(own, _json_number(position.logprob))
        return found

    def _token_name(self, token: int) -> str:
        """Return a token's name in logprobs: `" world"`, `"bytes:\\xe2\\x82"` for a part of a
        character, or `"token_id:17"` if the client asked for unique names or the tokenizer lacks
        the token."""
        found = self._tokenizer.token(token)
        if self._request.return_tokens_as_token_ids or found is None:
            return _id_name(token)
        if "\ufffd" not in found.text:
            return found.text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in found.raw)


class ChatChoiceWriter(Choice):
    """Writes messages. With `parsed`, they have the content, reasoning and tool calls that the
    sampler found. `message` is the message so far."""

    has_offsets = False

    def __init__(self, request: ChatCompletionRequest, *, parsed: bool, **given: Any) -> None:
        super().__init__(request, **given)
        self._chat = request
        self._forced = forced_tool(request) is not None
        self._parsed = parsed or self._forced
        self._text = ""
        self._new: Json = {}
        self.message: Json = {"role": "assistant", "content": "", "refusal": None}

    @property
    def has_news(self) -> bool:
        return bool(self._new)

    def _add(self, tokens: NewTokens) -> None:
        super()._add(tokens)
        self._text += self.new_text
        if not self._parsed:
            self._take_news({"content": self.new_text})
        elif tokens.message:
            self._take_news(orjson.loads(tokens.message))
        elif tokens.finish is None:
            self._take_news({})
        elif self._forced:
            self._take_news(forced_message(self._chat, self._text))
        else:  # an engine of an earlier release parses nothing
            self._take_news({"content": self._text})
        if "tool_calls" in self.message:
            self.message["content"] = self.message["content"] or None
            self.finish = "tool_calls" if self.finish == "stop" else self.finish

    def _take_news(self, found: Json) -> None:
        """Add parts of a message: `content`, `reasoning` and whole `tool_calls`."""
        self._new = {}
        for field, name in (("content", "content"), ("reasoning", "reasoning_content")):
            if text := found.get(field):
                self._new[name] = text
                self.message[name] = str(self.message.get(name) or "") + str(text)
        if calls := [tool_call(call) for call in cast(list[Json], found.get("tool_calls") or ())]:
            known = cast(list[Json], self.message.setdefault("tool_calls", []))
            self._new["tool_calls"] = [
                {"index": index, **call} for index, call in enumerate(calls, start=len(known))
            ]
            known += calls

    def _content(self, stage: Stage) -> Json:
        if stage == "whole":
            return {"message": self.message}
        if stage == "opening":
            return {"delta": {"role": "assistant", "content": ""}}
        return {"delta": self._new or ({} if self.finish else {"content": ""})}

    def _logprobs(self, sample: tinker_pb2.SampleResponse | None) -> Json:
        content = [
            {
                **self._entry(position.token, position.logprob),
                "top_logprobs": [
                    self._entry(*other)
                    for other in position.alternatives[: self._request.alternatives]
                ],
            }
            for position in self.shown
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float | None) -> Json:
        found = self._tokenizer.token(token)
        return {
            "token": self._token_name(token),
            "logprob": None if logprob is None else _json_number(logprob),
            "bytes": list(found.raw) if found is not None else [],
        }


class ResponseBuilder:
    """Builds a request's response: whole with `response`, or streamed with `opening`, `parts` and
    `closing`. Choices follow the prompts, `n` for each."""

    def __init__(
        self,
        request: InferenceRequest,
        *,
        tokenizer: ModelTokenizer,
        prompts: Sequence[PreparedPrompt],
        params: sampler_pb2.SamplingParams,
        weight_version: str,
        parsed: bool = False,
    ) -> None:
        self._request = request
        self._prompts = prompts
        self._is_chat = isinstance(request, ChatCompletionRequest)
        self._shows_usage = bool(request.stream_options and request.stream_options.include_usage)
        self._n = request.n or 1
        self._cached_tokens = 0
        self._completion_tokens = 0
        self._heading: Json = {
            "id": f"{'chatcmpl' if self._is_chat else 'cmpl'}-{secrets.token_hex(14)}",
            "object": "chat.completion" if self._is_chat else "text_completion",
            "created": int(time.time()),
            "model": request.model,
            "tandem_weight_version": weight_version,
        }
        make_choice: Callable[..., Choice] = Choice
        if isinstance(request, ChatCompletionRequest):
            make_choice = partial(ChatChoiceWriter, parsed=parsed)
        self._choices = [
            make_choice(request, index=index, prompt=prompt, params=params, tokenizer=tokenizer)
            for index, prompt in enumerate(p for p in prompts for _ in range(self._n))
        ]

    def response(self, samples: Sequence[tinker_pb2.SampleResponse]) -> Json:
        """Return the whole response. `samples` follow the prompts."""
        for sample in samples:
            self.count(sample)
        sequences = ((sequence, sample) for sample in samples for sequence in sample.sequences)
        written = [
            choice.write_tokens(
                NewTokens.of_sample(one, one.topk_sampled_logprobs), "whole", sample
            )
            for choice, (one, sample) in zip(self._choices, sequences, strict=True)
        ]
        content = {**self._heading, "choices": written, "usage": self._usage()}
        if version := samples[-1].tandem_weight_version:  # later than asked for, in flight
            content["tandem_weight_version"] = version
        if self._is_chat and self._request.return_token_ids:
            content["prompt_token_ids"] = list(self._prompts[0].token_ids)
        return content

    def count(self, sample: tinker_pb2.SampleResponse) -> None:
        self._cached_tokens += sample.prompt_cache_hit_tokens
        self._completion_tokens += sum(len(s.tokens) // 4 for s in sample.sequences)

    def messages(self) -> list[Json]:
        """Return the whole messages of a finished chat."""
        return [one.message for one in self._choices if isinstance(one, ChatChoiceWriter)]

    @property
    def stop_string(self) -> str:
        """The stop string that ended the first choice, or ""."""
        return self._choices[0].stop_string

    def opening(self) -> list[Json]:
        if not (self._is_chat or self._request.echo or self._request.return_token_ids):
            return []
        return [self._chunk(one.write_tokens(NewTokens(), "opening")) for one in self._choices]

    def parts(self, delta: sampler_pb2.SampleDelta, *, prompt: int) -> list[Json]:
        """Return the parts for new tokens of a sample of this prompt, if there is anything
        to show."""
        choice = self._choices[prompt * self._n + delta.index]
        tokens = NewTokens.of_sample(delta, delta.topk, finished=delta.finished)
        part = choice.write_tokens(tokens, "part")
        shows_tokens = self._request.return_token_ids or self._request.alternatives is not None
        if choice.has_news or choice.finish or (shows_tokens and choice.shown):
            chunk = self._chunk(part)
            return [chunk | {"tandem_weight_version": delta.version} if delta.version else chunk]
        return []

    def closing(self) -> list[Json]:
        return [{**self._chunk(), "usage": self._usage()}] if self._shows_usage else []

    def _chunk(self, *choices: Json) -> Json:
        chunk = {**self._heading, "choices": list(choices)}
        if self._is_chat:
            chunk["object"] = "chat.completion.chunk"
        return {**chunk, "usage": None} if self._shows_usage else chunk

    def _usage(self) -> Json:
        prompt_tokens = sum(len(prompt.token_ids) for prompt in self._prompts)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": self._completion_tokens,
            "total_tokens": prompt_tokens + self._completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self._cached_tokens},
        }


def _alternatives(topk: tinker_pb2.TopkLogprobs, *, count: int) -> list[Alternatives]:
    """Read a [length, k] matrix without its empty cells. An empty matrix means no alternatives."""
    if not topk.length:
        return [()] * count
    cells = list(zip(array("i", topk.token_ids), array("f", topk.logprobs), strict=True))
    rows = (cells[start : start + topk.k] for start in range(0, len(cells), topk.k))
    return [[cell for cell in row if cell[1] > _NO_ALTERNATIVE] for row in rows]


def _id_name(token: int) -> str:
    return f"token_id:{token}"


def _json_number(logprob: float) -> float:
    return logprob if math.isfinite(logprob) and logprob > _MIN_LOGPROB else _MIN_LOGPROB
