"""`/v1/chat/completions`: messages, by the model's chat template, and the message that follows."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from gateway.api.openai.answer import Heading, Json
from gateway.api.openai.bodies import ChatBody
from gateway.api.openai.choice import Chunk
from gateway.api.openai.errors import FieldRefused
from gateway.api.openai.logprobs import LogprobWriter
from gateway.api.openai.messages import render_chat
from gateway.api.openai.request import Stops, sample_request
from gateway.api.openai.tokenizer import ModelTokenizer
from tandem.v1 import sampler_pb2
from tandem.wire.v1 import tinker_pb2


def check_chat(body: ChatBody) -> None:
    """What fields mean together. Raises `FieldRefused`."""
    if body.top_logprobs and not body.logprobs:
        raise FieldRefused("top_logprobs needs logprobs to be true", param="top_logprobs")
    if body.max_tokens == 0:
        raise FieldRefused("max_tokens is 0; at least 1 is needed", param="max_tokens")


async def chat_prompt(
    body: ChatBody, tokenizer: ModelTokenizer, *, max_length: int | None
) -> list[int]:
    """The tokens of the rendered chat. Special tokens are the template's to set, unless the
    request says otherwise. Raises `InvalidRequest`, or one of its kinds, or `SequenceTooLong`."""
    template = tokenizer.chat_template()
    text = await asyncio.to_thread(render_chat, template, body)
    return await tokenizer.encode(
        text, add_special_tokens=bool(body.add_special_tokens), max_length=max_length
    )


def chat_request(
    body: ChatBody, *, prompt: Sequence[int], stops: Stops
) -> sampler_pb2.SampleRequest:
    """Without a bound, an answer may be as long as the model's length lets it."""
    max_tokens = body.max_completion_tokens
    return sample_request(
        body,
        prompt=prompt,
        stops=stops,
        max_tokens=body.max_tokens if max_tokens is None else max_tokens,
        top_logprobs=(body.top_logprobs or 0) if body.logprobs else 0,
        prompt_logprobs=False,
    )


class ChatWriter:
    """Writes choices of this endpoint."""

    whole_kind = "chat.completion"
    streamed_kind = "chat.completion.chunk"
    id_prefix = "chatcmpl"
    echo_alone = False

    def __init__(self, body: ChatBody, tokenizer: ModelTokenizer, *, prompt: Sequence[int]) -> None:
        self._body = body
        self._prompt = prompt
        self._logprobs = LogprobWriter(tokenizer, by_id=bool(body.return_tokens_as_token_ids))

    def answer(self, heading: Heading, choices: Sequence[Json]) -> Json:
        """Where clients of vLLM look for the prompt's tokens, too."""
        content = heading.content(choices)
        if self._body.return_token_ids:
            content["prompt_token_ids"] = list(self._prompt)
        return content

    def whole(self, chunk: Chunk, _response: tinker_pb2.SampleResponse) -> Json:
        message = {"role": "assistant", "content": chunk.text, "refusal": None}
        return self._choice(chunk, first=True, message=message)

    def opening(self, index: int) -> Json | None:
        """What a streamed choice begins with, before anything is sampled."""
        prompt = {"prompt_token_ids": list(self._prompt), "token_ids": []}
        return {
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
            **(prompt if self._body.return_token_ids else {}),
        }

    def part(self, chunk: Chunk) -> Json | None:
        """None: nothing that this client would see."""
        tells = self._body.logprobs or self._body.return_token_ids
        if not (chunk.text or chunk.finish or (tells and chunk.piece.tokens)):
            return None
        delta = {"content": chunk.text} if chunk.text or not chunk.finish else {}
        return self._choice(chunk, first=False, delta=delta)

    def _choice(self, chunk: Chunk, *, first: bool, **said: object) -> Json:
        logprobs = None
        if self._body.logprobs:
            logprobs = self._logprobs.of_chat(chunk.piece, top=self._body.top_logprobs or 0)
        content: Json = {
            "index": chunk.index,
            **said,
            "logprobs": logprobs,
            "finish_reason": chunk.finish,
        }
        if self._body.return_token_ids:
            content["token_ids"] = list(chunk.piece.tokens)
            if first:
                content["prompt_token_ids"] = list(self._prompt)
        return content
