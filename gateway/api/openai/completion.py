"""`/v1/completions`: prompts as text or tokens, and what continues them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gateway.api.openai.answer import Heading, Json
from gateway.api.openai.bodies import MAX_PROMPTS, CompletionBody
from gateway.api.openai.choice import Alternatives, Chunk, alternatives_of
from gateway.api.openai.errors import FieldRefused
from gateway.api.openai.logprobs import LogprobWriter
from gateway.api.openai.request import Stops, sample_request
from gateway.api.openai.tokenizer import ModelTokenizer
from tandem.v1 import sampler_pb2
from tandem.wire.v1 import tinker_pb2

_DEFAULT_MAX_TOKENS = 16


def check_completion(body: CompletionBody) -> None:
    """What fields mean together. Raises `FieldRefused`."""
    if body.best_of not in (None, 1, body.n or 1):
        raise FieldRefused(
            "best_of is not offered; ask for n choices with logprobs and choose yourself",
            param="best_of",
        )
    if body.max_tokens == 0 and not body.echo:
        raise FieldRefused("max_tokens is 0; at least 1 is needed without echo", param="max_tokens")
    if body.stream and body.echo and body.logprobs is not None:
        raise FieldRefused(
            "the logprobs of a prompt are known when all is sampled; ask for echo with logprobs "
            "without stream",
            param="stream",
        )


async def completion_prompts(
    body: CompletionBody, tokenizer: ModelTokenizer, *, max_length: int | None
) -> list[list[int]]:
    """Raises `FieldRefused`, or `SequenceTooLong`."""
    given = body.prompt
    prompts: Sequence[str | list[int]]
    if isinstance(given, str):
        prompts = [given]
    elif given and isinstance(given[0], int):
        prompts = [[token for token in given if isinstance(token, int)]]
    else:
        prompts = [one for one in given if not isinstance(one, int)]
    if not 0 < len(prompts) <= MAX_PROMPTS:
        raise FieldRefused(
            f"prompt holds {len(prompts)} prompts; 1 to {MAX_PROMPTS} are possible", param="prompt"
        )
    special = body.add_special_tokens is not False
    return [
        await tokenizer.encode(one, add_special_tokens=special, max_length=max_length)
        if isinstance(one, str)
        else one
        for one in prompts
    ]


def completion_request(
    body: CompletionBody, *, prompt: Sequence[int], stops: Stops
) -> sampler_pb2.SampleRequest:
    """An engine samples at least one token; where none is wanted, it is left out later."""
    max_tokens = _DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    return sample_request(
        body,
        prompt=prompt,
        stops=stops,
        max_tokens=max(1, max_tokens),
        top_logprobs=body.logprobs or 0,
        prompt_logprobs=bool(body.echo and body.logprobs is not None),
    )


class CompletionWriter:
    """Writes choices of this endpoint. `prompts` are in the order of the request."""

    streamed_kind = whole_kind = "text_completion"
    id_prefix = "cmpl"

    def __init__(
        self,
        body: CompletionBody,
        tokenizer: ModelTokenizer,
        *,
        prompts: Sequence[Sequence[int]],
    ) -> None:
        self._body = body
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._n = body.n or 1
        self._logprobs = LogprobWriter(tokenizer, by_id=bool(body.return_tokens_as_token_ids))
        self._offsets: dict[int, int] = {}

    @property
    def echo_alone(self) -> bool:
        """Whether nothing that is sampled is wanted."""
        return self._body.max_tokens == 0

    def answer(self, heading: Heading, choices: Sequence[Json]) -> Json:
        return heading.content(choices)

    def whole(self, chunk: Chunk, response: tinker_pb2.SampleResponse) -> Json:
        logprobs = None
        if self._body.logprobs is not None:
            logprobs = self._whole_logprobs(chunk, response)
        text = self._echoed(chunk.index) + chunk.text
        return self._choice(chunk, text=text, logprobs=logprobs, first=True)

    def opening(self, index: int) -> Json | None:
        """What a streamed choice begins with, before anything is sampled."""
        if not (self._body.echo or self._body.return_token_ids):
            return None
        prompt = {"prompt_token_ids": list(self._prompt(index))}
        return {
            "index": index,
            "text": self._echoed(index),
            "logprobs": None,
            "finish_reason": None,
            **(prompt | {"token_ids": []} if self._body.return_token_ids else {}),
        }

    def part(self, chunk: Chunk) -> Json | None:
        """None: nothing that this client would see."""
        tells = self._body.logprobs is not None or self._body.return_token_ids
        if not (chunk.text or chunk.finish or (tells and chunk.piece.tokens)):
            return None
        logprobs = None
        if self._body.logprobs is not None:
            offset = self._offsets.get(chunk.index, 0)
            logprobs = self._piece_logprobs(chunk, offset=offset)
            texts = (self._tokenizer.token(token).text for token in chunk.piece.tokens)
            self._offsets[chunk.index] = offset + sum(map(len, texts))
        return self._choice(chunk, text=chunk.text, logprobs=logprobs, first=False)

    def _choice(self, chunk: Chunk, *, text: str, logprobs: Json | None, first: bool) -> Json:
        content: Json = {
            "index": chunk.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": chunk.finish,
        }
        if self._body.return_token_ids:
            content["token_ids"] = list(chunk.piece.tokens)
            if first:
                content["prompt_token_ids"] = list(self._prompt(chunk.index))
        return content

    def _piece_logprobs(self, chunk: Chunk, *, offset: int) -> Json:
        return self._logprobs.of_completion(
            chunk.piece.tokens,
            chunk.piece.logprobs,
            chunk.piece.alternatives,
            top=self._body.logprobs or 0,
            offset=offset,
        )

    def _whole_logprobs(self, chunk: Chunk, response: tinker_pb2.SampleResponse) -> Json:
        """Those of the prompt, if it is wanted, and of what was sampled."""
        if not self._body.echo:
            return self._piece_logprobs(chunk, offset=0)
        piece, prompt = chunk.piece, self._prompt(chunk.index)
        of_prompt = np.frombuffer(response.prompt_logprobs, "<f4").tolist()
        rows: list[Alternatives | None] = [None] * len(prompt)
        sampled: Sequence[Alternatives | None] = piece.alternatives or [None] * len(piece.tokens)
        if response.HasField("topk_prompt_logprobs"):
            rows = list(alternatives_of(response.topk_prompt_logprobs))
        return self._logprobs.of_completion(
            [*prompt, *piece.tokens],
            [None, *of_prompt[1:], *piece.logprobs],
            [*rows, *sampled],
            top=self._body.logprobs or 0,
            offset=0,
        )

    def _prompt(self, index: int) -> Sequence[int]:
        return self._prompts[index // self._n]

    def _echoed(self, index: int) -> str:
        """The prompt's text, as it was given, if it is wanted."""
        if not self._body.echo:
            return ""
        given = self._body.prompt
        at = index // self._n
        if isinstance(given, str):
            return given
        text = given[at] if given and isinstance(given[0], str) else None
        return text if isinstance(text, str) else self._tokenizer.decode(self._prompts[at])
