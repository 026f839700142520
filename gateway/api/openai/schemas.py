"""Request and response models of the OpenAI-compatible routes.

Unknown fields are refused, as OpenAI does, because a silently ignored request is worse. Unsupported
fields may have the value "off", which clients send by default."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from gateway.api.bounds import BoundFields
from gateway.api.errors import InvalidParameter
from gateway.api.fields import Answer, VersionRunInfo
from gateway.api.request_body import FirstFault, Ints, Texts

Json = dict[str, object]
TokenIds = Annotated[list[Annotated[int, Field(ge=0, le=2**31 - 1)]], FirstFault()]
ParserName = Annotated[str, Field(pattern=r"^[\w.-]{1,64}$")]
"""The name of one of vLLM's parsers, or `none`."""
Objects = Annotated[list[Json], FirstFault()]
FinishReason = Literal["stop", "length", "tool_calls"]
NO_PARSER = "none"

MAX_N = 128
MAX_PROMPTS = 2048
MAX_TOP_LOGPROBS = 1000
DEFAULT_MAX_TOKENS = 16
"""For completions. A chat completion may fill the model's context."""


# --- Requests ------------------------------------------------------------------------------


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="ignore")  # the other options concern padding and statistics

    include_usage: bool | None = None


class PlainFormat(BaseModel):
    type: Literal["text", "json_object"]


class NamedSchema(BaseModel):
    schema_: Json | bool | str = Field(alias="schema")


class SchemaFormat(BaseModel):
    type: Literal["json_schema"]
    json_schema: NamedSchema


class StructuredOutputs(BaseModel):
    """vLLM's forms of a sample, of which one may be given. False or null is none."""

    model_config = ConfigDict(extra="forbid")

    regex: str | None = None
    json_: Json | bool | str | None = Field(None, alias="json")
    choice: Texts | None = None
    grammar: str | None = None
    json_object: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_none(cls, fields: object) -> object:
        if not isinstance(fields, dict):
            return fields
        return {k: value for k, value in fields.items() if value is not None and value is not False}


ResponseFormat = Annotated[PlainFormat | SchemaFormat, Field(discriminator="type")]


class SamplingFields(BoundFields):
    """The common request fields. `n` is the number of choices per prompt. `in_flight` continues the
    answer with the run's newer weights when a later such request brings them. After validation,
    `max_tokens` is None only without a limit."""

    model_config = ConfigDict(extra="allow")

    model: str = Field(min_length=1, max_length=400)
    max_tokens: int | None = Field(None, ge=0, le=2**31 - 1)
    temperature: float | None = Field(None, ge=0, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1)
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    top_k: int | None = Field(None, ge=-1, le=2**31 - 1)
    n: int | None = Field(None, ge=1, le=MAX_N)
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    stop: str | Texts | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    add_special_tokens: bool | None = None
    in_flight: bool = False
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Json | str | None = None
    guided_regex: str | None = None
    guided_choice: Texts | None = None
    guided_grammar: str | None = None

    @model_validator(mode="after")
    def _check_fields(self) -> Self:
        for name, value in (self.model_extra or {}).items():
            if value is None or name in HARMLESS_FIELDS:
                continue
            if name not in _UNSUPPORTED_FIELDS:
                known = ", ".join(sorted(type(self).model_fields))
                raise InvalidParameter(
                    f"unknown field {name[:100]!r}; known: {known}", param=name[:100]
                )
            off, instead = _UNSUPPORTED_FIELDS[name]
            if (isinstance(value, bool), value) not in [(isinstance(o, bool), o) for o in off]:
                raise InvalidParameter(f"{name} would change the result: {instead}", param=name)
        if self.stream_options is not None and not self.stream:
            raise InvalidParameter("stream_options needs stream to be true", param="stream_options")
        return self


class CompletionRequest(SamplingFields):
    """`prompt` is a text, several texts, token ids, or several lists of token ids."""

    prompt: str | Ints | Texts | Annotated[list[Ints], FirstFault()]
    best_of: int | None = Field(None, ge=1)
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    echo: bool | None = None

    @property
    def alternatives(self) -> int | None:
        """The number of alternatives per logprob, None for no logprobs."""
        return self.logprobs

    @model_validator(mode="after")
    def _check_completion(self) -> Self:
        if self.best_of not in (None, 1, self.n or 1):
            raise InvalidParameter(
                "best_of is not offered; ask for n choices with logprobs and choose yourself",
                param="best_of",
            )
        if self.max_tokens is None:
            self.max_tokens = DEFAULT_MAX_TOKENS
        if self.max_tokens == 0 and not self.echo:
            raise InvalidParameter(
                "max_tokens is 0; at least 1 is needed without echo", param="max_tokens"
            )
        if self.stream and self.echo and self.logprobs is not None:
            raise InvalidParameter(
                "the logprobs of a prompt are known only at the end; ask for echo with logprobs "
                "without stream",
                param="stream",
            )
        return self


class ChatCompletionRequest(SamplingFields):
    echo: ClassVar[bool] = False

    messages: Objects = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1, le=2**31 - 1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    tools: Objects | None = None
    tool_choice: str | Json | None = None
    parallel_tool_calls: bool | None = None
    tool_parser: ParserName | None = None
    reasoning_parser: ParserName | None = None
    documents: Objects | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: Json | None = None

    @property
    def shown_tools(self) -> list[Json] | None:
        """The tools that the template shows to the model."""
        return self.tools if self.tools and self.tool_choice != "none" else None

    @property
    def alternatives(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @model_validator(mode="after")
    def _check_chat(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise InvalidParameter("top_logprobs needs logprobs to be true", param="top_logprobs")
        if self.max_tokens == 0:
            raise InvalidParameter("max_tokens is 0; at least 1 is needed", param="max_tokens")
        if self.max_completion_tokens is not None:
            self.max_tokens = self.max_completion_tokens
        if self.add_generation_prompt and self.continue_final_message:
            raise InvalidParameter(
                "a response either continues the last message or begins a new one: with "
                "continue_final_message, set add_generation_prompt to false",
                param="continue_final_message",
            )
        self._check_tools()
        return self

    def _check_tools(self) -> None:
        functions = [tool.get("function") for tool in self.tools or ()]
        names = [each.get("name") if isinstance(each, dict) else None for each in functions]
        if not all(isinstance(name, str) and name for name in names):
            raise InvalidParameter("each of the tools needs a function with a name", param="tools")
        choice = self.tool_choice
        if choice in (None, "none", "auto") or (choice == "required" and names):
            return
        function = choice.get("function") if isinstance(choice, dict) else None
        if not isinstance(function, dict) or function.get("name") not in names:
            raise InvalidParameter(
                "tool_choice can be none, auto, required, or an object with the type function and "
                "the name of one of the tools; required needs tools",
                param="tool_choice",
            )


InferenceRequest = CompletionRequest | ChatCompletionRequest

HARMLESS_FIELDS = frozenset(
    {
        "user",
        "metadata",
        "store",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "service_tier",
        "prediction",  # only makes a response faster
        "parallel_tool_calls",
        "priority",
        "request_id",
        "spaces_between_special_tokens",
        "include_reasoning",
    }
)
"""Accepted with any value, because they do not change the tokens."""


_EMPTY = ["", [], {}, False, 0]

_UNSUPPORTED_FIELDS: Mapping[str, tuple[Sequence[object], str]] = {
    "repetition_penalty": ([1], "it is not offered; use frequency_penalty or presence_penalty"),
    "length_penalty": ([1], "there is no beam search; leave it out"),
    "min_tokens": ([0], "it is not offered; leave it out"),
    "logit_bias": (_EMPTY, "biases are not offered; leave it out"),
    "bad_words": (_EMPTY, "it is not offered; leave it out"),
    "allowed_token_ids": (_EMPTY, "it is not offered; use structured_outputs"),
    "logits_processors": (_EMPTY, "no code of a client is executed"),
    "vllm_xargs": (_EMPTY, "it is not offered; leave it out"),
    "use_beam_search": (_EMPTY, "there is no beam search; leave it out"),
    "suffix": (_EMPTY, "text is only continued, not filled in; leave it out"),
    "truncate_prompt_tokens": (_EMPTY, "prompts are never truncated; shorten it yourself"),
    "prompt_logprobs": (_EMPTY, "use echo with logprobs in /v1/completions"),
    "chat_template": (_EMPTY, "only the model's own template is used; see chat_template_kwargs"),
    "functions": (_EMPTY, "it is obsolete; use tools"),
    "function_call": (["none", "auto"], "it is obsolete; use tools"),
    "modalities": ([["text"]], "this server samples only text"),
    "audio": (_EMPTY, "this server samples only text"),
    "web_search_options": (_EMPTY, "there is no search; leave it out"),
    "reasoning_effort": (
        [*_EMPTY, "none"],
        "pass it to the template: chat_template_kwargs",
    ),
    "verbosity": ([*_EMPTY, "medium"], "there is no such setting; leave it out"),
}
"""Unsupported fields: the values that mean "off", and advice."""


# --- Responses -----------------------------------------------------------------------------


class Model(Answer):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int | None


class ModelList(Answer):
    object: Literal["list"]
    data: list[Model]


class PromptTokensDetails(Answer):
    cached_tokens: int


class Usage(Answer):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class _Response(Answer):
    id: str
    created: int
    model: str
    tandem_weight_version: str
    usage: Usage


class _Choice(Answer):
    """`token_ids` and `prompt_token_ids` need `return_token_ids`, as in vLLM. `tandem_versions` are
    the weight versions of the tokens of an in-flight sample."""

    index: int = Field(ge=0)
    finish_reason: FinishReason
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    tandem_versions: list[VersionRunInfo] | None = None


class CompletionLogprobs(Answer):
    """One entry per token of the choice, with end and stop tokens. `text_offset` is in characters.
    A prompt's first token has no logprob."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float | None] | None] | None
    text_offset: list[int]


class CompletionChoice(_Choice):
    text: str
    logprobs: CompletionLogprobs | None


class Completion(_Response):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class TokenLogprob(Answer):
    token: str
    logprob: float
    bytes: list[int]


class ContentLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(Answer):
    content: list[ContentLogprob]
    refusal: None


class CalledFunction(Answer):
    name: str
    arguments: str


class CalledTool(Answer):
    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(Answer):
    """`reasoning_content` and `tool_calls` are set if the answer has any. `content` is null with
    tool calls alone. `arguments` are JSON."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    tool_calls: list[CalledTool] | None = None


class ChatChoice(_Choice):
    message: ChatMessage
    logprobs: ChatLogprobs | None


class ChatCompletion(_Response):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    prompt_token_ids: list[int] | None = None


# --- Errors --------------------------------------------------------------------------------


class ErrorDetails(Answer):
    message: str
    type: str
    param: str | None
    code: str
    limit: str | None = None
    limit_value: int | None = None
    used: int | None = None
    retry_after_seconds: float | None = None
    queue_position: int | None = None


class ErrorResponse(Answer):
    error: ErrorDetails
