"""From sampled tokens to responses, whole or streamed: the text, logprobs and usage of choices."""

from __future__ import annotations

import math
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from gateway.api.openai.detokenizer import Detokenizer, StopCutter
from gateway.api.openai.prompts import Prompt, StopConditions
from gateway.api.openai.schemas import FinishReason, Json, SamplingFields
from gateway.api.openai.tokenizer import ModelTokenizer
from tandem.v1 import sampler_pb2
from tandem.wire.v1 import tinker_pb2

Alternatives = Sequence[tuple[int, float]]
"""Tokens that could stand at one position, with their logprobs, likeliest first."""

_NO_ALTERNATIVE = -99999.0
"""The logprob of an empty cell in the wire protocol's matrix of alternatives."""

_MIN_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not have."""


@dataclass(frozen=True)
class SampledTokens:
    """New tokens of one sample, with one logprob each, and each with alternatives if they were
    asked for. `finish` is set with the last tokens."""

    ids: Sequence[int]
    logprobs: Sequence[float]
    alternatives: Sequence[Alternatives] | None = None
    finish: FinishReason | None = None

    @staticmethod
    def of_sequence(sequence: tinker_pb2.SampledSequence) -> SampledTokens:
        """Read a whole sample."""
        has_top = sequence.HasField("topk_sampled_logprobs")
        return SampledTokens(
            ids=_ints(sequence.tokens),
            logprobs=_floats(sequence.logprobs),
            alternatives=_alternatives(sequence.topk_sampled_logprobs) if has_top else None,
            finish=_finish_reason(sequence.stop_reason),
        )

    @staticmethod
    def of_delta(delta: sampler_pb2.SampleDelta) -> SampledTokens:
        return SampledTokens(
            ids=_ints(delta.tokens),
            logprobs=_floats(delta.logprobs),
            alternatives=_alternatives(delta.topk) if delta.HasField("topk") else None,
            finish=_finish_reason(delta.stop_reason) if delta.finished else None,
        )

    def after(self, count: int) -> SampledTokens:
        """Return these tokens without the first `count`."""
        return SampledTokens(
            ids=self.ids[count:],
            logprobs=self.logprobs[count:],
            alternatives=self.alternatives[count:] if self.alternatives is not None else None,
            finish=self.finish,
        )


_NO_TOKENS = SampledTokens(ids=[], logprobs=[])


class Choice:
    """One choice: turns its tokens into text as they arrive.

    The text may lag behind the tokens. Stop tokens and stop strings are among the tokens and
    not in the text (with `include_stop_str_in_output`, in both).
    """

    def __init__(
        self,
        request: SamplingFields,
        *,
        index: int,
        prompt: Prompt,
        stops: StopConditions,
        tokenizer: ModelTokenizer,
    ) -> None:
        self.index = index
        self.prompt = prompt
        self.token_count = 0
        self.text_offset = 0
        self.finish: FinishReason | None = None
        keep_stop = request.include_stop_str_in_output
        self._silent = frozenset[int]() if keep_stop else frozenset(stops.token_ids)
        self._cutter = StopCutter(stops.strings, keep=keep_stop)
        self._detokenizer = Detokenizer(
            tokenizer,
            context=prompt.token_ids[-16:],
            skip_special_tokens=request.skip_special_tokens,
        )

    def add(self, tokens: SampledTokens) -> str:
        """Return the text that these tokens add."""
        self.token_count += len(tokens.ids)
        spoken = [token for token in tokens.ids if token not in self._silent]
        text = self._cutter.push(self._detokenizer.push(spoken))
        if tokens.finish is not None:
            text += self._cutter.push(self._detokenizer.finish()) + self._cutter.finish()
            self.finish = "stop" if self._cutter.stopped else tokens.finish
        return text


class ResponseBuilder(ABC):
    """Builds the response of one request: whole with `response`, or in parts with `opening`,
    `delta`, `remainder` and `closing`. Choices are in the order of the prompts, `n` for each."""

    id_prefix: ClassVar[str]
    object_name: ClassVar[str]
    chunk_object_name: ClassVar[str]

    def __init__(
        self,
        request: SamplingFields,
        *,
        tokenizer: ModelTokenizer,
        prompts: Sequence[Prompt],
        stops: StopConditions,
        weight_version: str,
    ) -> None:
        self._request = request
        self._tokenizer = tokenizer
        self._n = request.n or 1
        self._prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        self._cached_tokens = 0
        self._completion_tokens = 0
        self._heading: Json = {
            "id": f"{self.id_prefix}-{secrets.token_hex(14)}",
            "created": int(time.time()),
            "model": request.model,
            "tandem_weight_version": weight_version,
        }
        self._choices = [
            Choice(request, index=index, prompt=prompt, stops=stops, tokenizer=tokenizer)
            for index, prompt in enumerate(p for p in prompts for _ in range(self._n))
        ]

    def response(self, samples: Sequence[tinker_pb2.SampleResponse]) -> Json:
        """Return the whole response; `samples` are in the order of the prompts."""
        written = []
        for prompt, response in enumerate(samples):
            for choice, sequence in self._sequences(response, prompt=prompt):
                tokens = self._wanted(SampledTokens.of_sequence(sequence))
                text = choice.add(tokens)
                written.append(self._whole(choice, tokens, text, response))
        return {
            **self._heading,
            "object": self.object_name,
            "choices": written,
            "usage": self._usage(),
        }

    def opening(self) -> list[Json]:
        """Return the parts that begin the choices of a stream, before any token is sampled."""
        openings = (self._opening(choice) for choice in self._choices)
        return [self._chunk(opening) for opening in openings if opening is not None]

    def delta(self, delta: sampler_pb2.SampleDelta, *, prompt: int) -> list[Json]:
        """Return the parts for new tokens of a sample of the prompt with this index."""
        choice = self._choices[prompt * self._n + delta.index]
        return self._chunks(choice, SampledTokens.of_delta(delta))

    def remainder(self, response: tinker_pb2.SampleResponse, *, prompt: int) -> list[Json]:
        """Return the parts for the tokens of a prompt's samples that no delta carried."""
        chunks: list[Json] = []
        for choice, sequence in self._sequences(response, prompt=prompt):
            if choice.finish is None:
                tokens = SampledTokens.of_sequence(sequence).after(choice.token_count)
                chunks += self._chunks(choice, tokens)
        return chunks

    def closing(self) -> list[Json]:
        """Return the last part of a stream: the usage, if it is wanted."""
        return [{**self._chunk(), "usage": self._usage()}] if self._request.wants_usage else []

    @abstractmethod
    def _opening(self, choice: Choice) -> Json | None: ...

    @abstractmethod
    def _part(self, choice: Choice, tokens: SampledTokens, text: str) -> Json: ...

    @abstractmethod
    def _whole(
        self,
        choice: Choice,
        tokens: SampledTokens,
        text: str,
        response: tinker_pb2.SampleResponse,
    ) -> Json: ...

    def _sequences(
        self, response: tinker_pb2.SampleResponse, *, prompt: int
    ) -> Iterator[tuple[Choice, tinker_pb2.SampledSequence]]:
        """Yield the choices of a prompt with their whole samples, and count the usage."""
        self._cached_tokens += response.prompt_cache_hit_tokens
        if self._request.max_tokens != 0:
            self._completion_tokens += sum(len(s.tokens) // 4 for s in response.sequences)
        choices = self._choices[prompt * self._n : (prompt + 1) * self._n]
        yield from zip(choices, response.sequences, strict=True)

    def _wanted(self, tokens: SampledTokens) -> SampledTokens:
        """Drop the token that an engine samples at least, if `max_tokens` is 0."""
        if self._request.max_tokens != 0:
            return tokens
        return SampledTokens(ids=[], logprobs=[], finish=tokens.finish and "length")

    def _chunks(self, choice: Choice, tokens: SampledTokens) -> list[Json]:
        """Return no chunk for tokens of which the client would see nothing."""
        tokens = self._wanted(tokens)
        text = choice.add(tokens)
        request = self._request
        shows_tokens = request.return_token_ids or request.alternatives is not None
        if text or choice.finish or (shows_tokens and tokens.ids):
            return [self._chunk(self._part(choice, tokens, text))]
        return []

    def _chunk(self, *choices: Json) -> Json:
        usage: Json = {"usage": None} if self._request.wants_usage else {}
        return {
            **self._heading,
            "object": self.chunk_object_name,
            "choices": list(choices),
            **usage,
        }

    def _choice(
        self,
        choice: Choice,
        tokens: SampledTokens,
        *,
        logprobs: Json | None,
        with_prompt: bool,
        **content: object,
    ) -> Json:
        written: Json = {
            "index": choice.index,
            **content,
            "logprobs": logprobs,
            "finish_reason": choice.finish,
        }
        if self._request.return_token_ids:
            written["token_ids"] = list(tokens.ids)
            if with_prompt:
                written["prompt_token_ids"] = list(choice.prompt.token_ids)
        return written

    def _token_name(self, token: int) -> str:
        """Return how logprobs name a token: `" world"`, `"bytes:\\xe2\\x82"` for a part of a
        character, or `"token_id:17"` if the client asked for names that are unique."""
        if self._request.return_tokens_as_token_ids:
            return f"token_id:{token}"
        found = self._tokenizer.token(token)
        if "\ufffd" not in found.text:
            return found.text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in found.raw)

    def _usage(self) -> Json:
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._completion_tokens,
            "total_tokens": self._prompt_tokens + self._completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self._cached_tokens},
        }


class CompletionBuilder(ResponseBuilder):
    id_prefix = "cmpl"
    object_name = chunk_object_name = "text_completion"

    def _opening(self, choice: Choice) -> Json | None:
        if not (self._request.echoes or self._request.return_token_ids):
            return None
        text = self._echoed(choice)
        return self._choice(choice, _NO_TOKENS, text=text, logprobs=None, with_prompt=True)

    def _part(self, choice: Choice, tokens: SampledTokens, text: str) -> Json:
        logprobs = self._logprobs(choice, tokens)
        return self._choice(choice, tokens, text=text, logprobs=logprobs, with_prompt=False)

    def _whole(
        self,
        choice: Choice,
        tokens: SampledTokens,
        text: str,
        response: tinker_pb2.SampleResponse,
    ) -> Json:
        logprobs = self._logprobs(choice, tokens, scored=response)
        text = self._echoed(choice) + text
        return self._choice(choice, tokens, text=text, logprobs=logprobs, with_prompt=True)

    def _logprobs(
        self,
        choice: Choice,
        tokens: SampledTokens,
        scored: tinker_pb2.SampleResponse | None = None,
    ) -> Json | None:
        """Return the logprobs of the next tokens of a choice, preceded, in an echo, by those of
        the prompt, which are in `scored`."""
        if self._request.alternatives is None:
            return None
        ids = tokens.ids
        logprobs: Sequence[float | None] = tokens.logprobs
        rows: Sequence[Alternatives] = tokens.alternatives or [()] * len(ids)
        if scored is not None and self._request.echoes:
            prompt = choice.prompt.token_ids
            has_top = scored.HasField("topk_prompt_logprobs")
            top = _alternatives(scored.topk_prompt_logprobs) if has_top else [()] * len(prompt)
            ids = [*prompt, *ids]
            logprobs = [None, *_floats(scored.prompt_logprobs)[1:], *logprobs]
            rows = [*top, *rows]
        offsets = []
        for token in ids:
            offsets.append(choice.text_offset)
            choice.text_offset += len(self._tokenizer.token(token).text)
        tops = [self._top(*position) for position in zip(ids, logprobs, rows, strict=True)]
        return {
            "tokens": [self._token_name(token) for token in ids],
            "token_logprobs": [_json_number(logprob) for logprob in logprobs],
            "top_logprobs": tops if self._request.alternatives else None,
            "text_offset": offsets,
        }

    def _top(self, token: int, logprob: float | None, row: Alternatives) -> Json | None:
        """Return the likeliest tokens, and the sampled one too if it is not among them. The first
        token of a prompt has no logprob."""
        if logprob is None:
            return None
        found: Json = {
            self._token_name(other): _json_number(value)
            for other, value in row[: self._request.alternatives]
        }
        found.setdefault(self._token_name(token), _json_number(logprob))
        return found

    def _echoed(self, choice: Choice) -> str:
        if not self._request.echoes:
            return ""
        prompt = choice.prompt
        return prompt.text if prompt.text is not None else self._tokenizer.decode(prompt.token_ids)


class ChatBuilder(ResponseBuilder):
    """Chats have one prompt, whose token ids vLLM's clients also look for at the top level."""

    id_prefix = "chatcmpl"
    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"

    def response(self, samples: Sequence[tinker_pb2.SampleResponse]) -> Json:
        prompt_ids = list(self._choices[0].prompt.token_ids)
        more: Json = {"prompt_token_ids": prompt_ids} if self._request.return_token_ids else {}
        return {**super().response(samples), **more}

    def _opening(self, choice: Choice) -> Json:
        delta = {"role": "assistant", "content": ""}
        return self._choice(choice, _NO_TOKENS, delta=delta, logprobs=None, with_prompt=True)

    def _part(self, choice: Choice, tokens: SampledTokens, text: str) -> Json:
        delta = {"content": text} if text or not choice.finish else {}
        logprobs = self._logprobs(tokens)
        return self._choice(choice, tokens, delta=delta, logprobs=logprobs, with_prompt=False)

    def _whole(
        self,
        choice: Choice,
        tokens: SampledTokens,
        text: str,
        response: tinker_pb2.SampleResponse,
    ) -> Json:
        message = {"role": "assistant", "content": text, "refusal": None}
        logprobs = self._logprobs(tokens)
        return self._choice(choice, tokens, message=message, logprobs=logprobs, with_prompt=True)

    def _logprobs(self, tokens: SampledTokens) -> Json | None:
        top = self._request.alternatives
        if top is None:
            return None
        rows = tokens.alternatives or [()] * len(tokens.ids)
        content = [
            {
                **self._entry(token, logprob),
                "top_logprobs": [self._entry(*other) for other in row[:top]],
            }
            for token, logprob, row in zip(tokens.ids, tokens.logprobs, rows, strict=True)
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> Json:
        return {
            "token": self._token_name(token),
            "logprob": _json_number(logprob),
            "bytes": list(self._tokenizer.token(token).raw),
        }


def _alternatives(topk: tinker_pb2.TopkLogprobs) -> list[Alternatives]:
    """Read a [length, k] matrix; cells without a token are left out."""
    shape = (topk.length, topk.k)
    ids = np.frombuffer(topk.token_ids, "<i4").reshape(shape)
    logprobs = np.frombuffer(topk.logprobs, "<f4").reshape(shape)
    return [
        [(i, value) for i, value in zip(row, values, strict=True) if value > _NO_ALTERNATIVE]
        for row, values in zip(ids.tolist(), logprobs.tolist(), strict=True)
    ]


def _finish_reason(reason: int) -> FinishReason:
    return "length" if reason == tinker_pb2.STOP_REASON_LENGTH else "stop"


def _ints(data: bytes) -> list[int]:
    return np.frombuffer(data, "<i4").tolist()  # type: ignore[no-any-return]


def _floats(data: bytes) -> list[float]:
    return np.frombuffer(data, "<f4").tolist()  # type: ignore[no-any-return]


def _json_number(logprob: float | None) -> float | None:
    if logprob is None:
        return None
    return logprob if math.isfinite(logprob) and logprob > _MIN_LOGPROB else _MIN_LOGPROB
