"""What a sample must look like: OpenAI's `response_format`, and vLLM's names for the same."""

from __future__ import annotations

import json
from collections.abc import Mapping

from gateway.api.openai.errors import FieldRefused
from tandem.v1 import sampler_pb2

_EXTENSIONS = ("regex", "json", "choice", "json_object")

Fields = Mapping[str, object]


def structured_output(
    *,
    response_format: Fields | None,
    structured_outputs: Fields | None,
    guided_json: object,
    guided_regex: object,
    guided_choice: object,
) -> sampler_pb2.StructuredOutput | None:
    """The form that the fields ask for; None: any text. Whether the form itself is right is the
    sampler's to say. Raises `FieldRefused` for more than one, or what is no form."""
    asked: list[tuple[str, sampler_pb2.StructuredOutput]] = []
    if response_format is not None:
        form = _response_format(response_format)
        if form is not None:
            asked.append(("response_format", form))
    guided = {"json": guided_json, "regex": guided_regex, "choice": guided_choice}
    asked += [
        (f"guided_{kind}", _form(kind, value, param=f"guided_{kind}"))
        for kind, value in guided.items()
        if value is not None
    ]
    for kind, value in (structured_outputs or {}).items():
        param = f"structured_outputs.{kind}"[:100]
        if value is None or value is False:
            continue
        if kind not in _EXTENSIONS:
            known = ", ".join(_EXTENSIONS)
            raise FieldRefused(f"{param} is not offered; known: {known}", param=param)
        asked.append((param, _form(kind, value, param=param)))
    if len(asked) > 1:
        names = " and ".join(name for name, _ in asked)
        raise FieldRefused(f"a sample can have one form; given: {names}", param=asked[1][0])
    return asked[0][1] if asked else None


def _response_format(value: Fields) -> sampler_pb2.StructuredOutput | None:
    match value.get("type"):
        case "text":
            return None
        case "json_object":
            return sampler_pb2.StructuredOutput(json_object=True)
        case "json_schema":
            described = value.get("json_schema")
            schema = described.get("schema") if isinstance(described, dict) else None
            if schema is None:
                raise FieldRefused(
                    "response_format has no json_schema.schema", param="response_format"
                )
            return _form("json", schema, param="response_format")
        case other:
            raise FieldRefused(
                f"response_format has the type {str(other)[:100]!r}; known: text, json_object, "
                "json_schema",
                param="response_format",
            )


def _form(kind: str, value: object, *, param: str) -> sampler_pb2.StructuredOutput:
    if kind == "json_object":
        return sampler_pb2.StructuredOutput(json_object=True)
    if kind == "regex" and isinstance(value, str):
        return sampler_pb2.StructuredOutput(regex=value)
    if kind == "json" and isinstance(value, dict | bool):
        return sampler_pb2.StructuredOutput(json_schema=json.dumps(value, ensure_ascii=False))
    if kind == "json" and isinstance(value, str):
        return sampler_pb2.StructuredOutput(json_schema=value)
    if kind == "choice" and isinstance(value, list) and all(isinstance(v, str) for v in value):
        return sampler_pb2.StructuredOutput(
            choice=sampler_pb2.StructuredOutput.Choices(choices=value)
        )
    wanted = {"regex": "a text", "json": "a JSON schema", "choice": "a list of texts"}[kind]
    raise FieldRefused(f"{param} must be {wanted}", param=param)
