"""The side entrance under /v1, whose forms are OpenAI's."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from gateway.api.description.base import Answer, AnswerFields, Binary, Described, json
from gateway.api.description.table import Table
from gateway.api.openai import routes
from gateway.api.openai.bodies import ChatBody, CompletionBody
from tandem.errors import (
    OperationTimedOut,
    Overloaded,
    SequenceTooLong,
    UnknownModel,
    UnknownRun,
    UnknownWeights,
    WorkerStartFailed,
)


class RefusedDetails(AnswerFields):
    message: str
    type: str
    param: str | None
    code: str
    limit: str | None = None
    limit_value: int | None = None
    used: int | None = None
    retry_after_seconds: float | None = None
    queue_position: int | None = None


class OpenAIRefusal(AnswerFields):
    error: RefusedDetails


class ListedModel(AnswerFields):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int | None


class ModelsListed(AnswerFields):
    object: Literal["list"]
    data: list[ListedModel]


class CachedTokens(AnswerFields):
    cached_tokens: int


class TokenUsage(AnswerFields):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class _Answered(AnswerFields):
    id: str
    created: int
    model: str
    tandem_weight_version: str
    usage: TokenUsage


class _Choice(AnswerFields):
    index: Annotated[int, Field(ge=0)]
    finish_reason: Literal["stop", "length"]
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class CompletionLogprobs(AnswerFields):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float | None] | None] | None
    text_offset: list[int]


class CompletionChoice(_Choice):
    text: str
    logprobs: CompletionLogprobs | None


class Completion(_Answered):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class TokenLogprob(AnswerFields):
    token: str
    logprob: float
    bytes: list[int]


class PlaceLogprobs(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(AnswerFields):
    content: list[PlaceLogprobs]
    refusal: None


class Message(AnswerFields):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(_Choice):
    message: Message
    logprobs: ChatLogprobs | None


class ChatCompletion(_Answered):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    prompt_token_ids: list[int] | None = None


_STREAM = Binary(
    "text/event-stream; charset=utf-8",
    "With `stream`: a line `data: JSON` for each part, the last one `data: [DONE]`",
)
_MODELS = (UnknownModel, UnknownWeights, UnknownRun)
_SAMPLED = (*_MODELS, SequenceTooLong, Overloaded, WorkerStartFailed, OperationTimedOut)
_RULES = (
    "A field that is unknown, or would change the result in a way that is not offered, is "
    "refused; the sentence says which and why.",
    "A stop string has 1 to 1024 characters, of 64 at most; a token id is one of the vocabulary.",
)

INFERENCE: Table = {
    routes.openai_models: Described(answers=json(ModelsListed), tag="OpenAI"),
    routes.openai_model: Described(
        answers=json(ListedModel),
        errors=_MODELS,
        rules=("A `tinker://` path must be one.",),
        tag="OpenAI",
    ),
    routes.openai_completions: Described(
        takes=((CompletionBody,),),
        answers={200: Answer(contents=(Completion, _STREAM))},
        errors=_SAMPLED,
        rules=_RULES,
        tag="OpenAI",
    ),
    routes.openai_chat_completions: Described(
        takes=((ChatBody,),),
        answers={200: Answer(contents=(ChatCompletion, _STREAM))},
        errors=_SAMPLED,
        rules=(*_RULES, "The model must have a chat template that takes the messages."),
        tag="OpenAI",
    ),
}
