"""The side entrance under /v1, whose forms are OpenAI's."""

from __future__ import annotations

from gateway.api.description.base import Answer, AnswerFields, Binary, Described, json
from gateway.api.description.table import Table
from gateway.api.openai import routes
from gateway.api.openai.schemas import (
    ChatCompletion,
    ChatCompletionRequest,
    Completion,
    CompletionRequest,
    Model,
    ModelList,
)
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
    routes.openai_models: Described(answers=json(ModelList), tag="OpenAI"),
    routes.openai_model: Described(
        answers=json(Model),
        errors=_MODELS,
        rules=("A `tinker://` path must be one.",),
        tag="OpenAI",
    ),
    routes.openai_completions: Described(
        takes=((CompletionRequest,),),
        answers={200: Answer(contents=(Completion, _STREAM))},
        errors=_SAMPLED,
        rules=_RULES,
        tag="OpenAI",
    ),
    routes.openai_chat_completions: Described(
        takes=((ChatCompletionRequest,),),
        answers={200: Answer(contents=(ChatCompletion, _STREAM))},
        errors=_SAMPLED,
        rules=(*_RULES, "The model must have a chat template that takes the messages."),
        tag="OpenAI",
    ),
}
