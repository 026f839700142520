"""The bodies of the two requests. What is not here is looked up in `fields.py`."""

from __future__ import annotations

from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gateway.api.json_bounds import MOST_TOKENS, FirstFault, check_json_size
from gateway.api.openai.errors import FieldRefused
from gateway.api.openai.fields import check_fields
from tandem.errors import MalformedPayload

Json = dict[str, object]
Ints = Annotated[list[int], FirstFault()]
Texts = Annotated[list[str], FirstFault()]
Objects = Annotated[list[Json], FirstFault()]

MAX_N = 128
MAX_PROMPTS = 2048
MAX_TOP_LOGPROBS = 1000


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="ignore")  # the others concern padding and statistics alone

    include_usage: bool | None = None


class Body(BaseModel):
    """What completions and chat completions have in common."""

    model_config = ConfigDict(extra="allow")

    model: str = Field(min_length=1, max_length=400)
    max_tokens: int | None = Field(None, ge=0, le=2**31 - 1)
    temperature: float | None = Field(None, ge=0, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=2**31 - 1)
    n: int | None = Field(None, ge=1, le=MAX_N)
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    stop: str | Texts | None = None
    stop_token_ids: Ints | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    add_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    response_format: Json | None = None
    structured_outputs: Json | None = None
    guided_json: Json | str | None = None
    guided_regex: str | None = None
    guided_choice: Texts | None = None

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class CompletionBody(Body):
    """`prompt`: a text, several, token ids, or several of those."""

    prompt: str | Ints | Texts | Annotated[list[Ints], FirstFault()]
    best_of: int | None = Field(None, ge=1)
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    echo: bool | None = None


class ChatBody(Body):
    messages: Objects = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1, le=2**31 - 1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    tools: Objects | None = None
    tool_choice: str | Json | None = None
    documents: Objects | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: Json | None = None


AnyBody = TypeVar("AnyBody", bound=Body)


def parse_body(model: type[AnyBody], content: bytes) -> AnyBody:
    """Raises `MalformedPayload` for what is no JSON, `FieldRefused` for fields that are wrong,
    unknown, or not offered, `PayloadTooLarge` for more values than any request has."""
    check_json_size(content, most_values=MOST_TOKENS)
    try:
        body = model.model_validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        if first["type"] == "json_invalid":
            raise MalformedPayload(f"the body is not JSON: {first['msg']}") from error
        where = ".".join(str(part) for part in first["loc"])
        param = str(first["loc"][0]) if first["loc"] else ""
        raise FieldRefused(
            f"{where}: {first['msg']}" if where else first["msg"], param=param
        ) from error
    check_fields(body.model_extra or {}, known=model.model_fields)
    return body
