"""The OpenAPI 3.1 document of an application, out of its own routes and their descriptions."""

from __future__ import annotations

import inspect
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.routing import Route

from gateway.api.access import NEEDS, Need
from gateway.api.description.base import (
    Answer,
    AuthRefusal,
    Binary,
    Content,
    Described,
    Refusal,
)
from gateway.api.description.inference import OpenAIRefusal
from gateway.api.description.table import Handler
from gateway.api.openai.errors import PREFIX as OPENAI
from gateway.api.openai.errors import status_of
from gateway.api.wire import AUTH
from tandem import __version__
from tandem.errors import (
    InvalidRequest,
    LimitExceeded,
    MalformedPayload,
    Overloaded,
    PayloadTooLarge,
    PermissionDenied,
    RequestTimedOut,
    TandemError,
    TokenRefused,
    Unauthenticated,
)

Json = dict[str, object]
Schemas = Mapping[type[BaseModel], Json]

_ABOUT = (
    "The routes of a Tandem gateway: those of the `tinker` SDK under /api/v1, Tandem's own under "
    "/api/tandem/v1. A request that is refused is answered with `{error, type, category}`; an "
    "accepted operation that fails is answered with 200 and the same fields."
)
_SECURITY: Json = {
    "ApiKey": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
    "Bearer": {"type": "http", "scheme": "bearer"},
}
_NO_BODY = "Nothing."


@dataclass(frozen=True)
class Operation:
    """One method of one route, and what is said of it."""

    method: str
    path: str
    parameters: Sequence[str]
    handler: Handler
    described: Described

    @property
    def need(self) -> Need:
        return NEEDS[self.handler.__name__]

    @property
    def needs_key(self) -> bool:
        return self.need not in ("nothing", "signature")

    @property
    def has_body(self) -> bool:
        return bool(self.described.takes) or self.described.takes_binary is not None

    @property
    def sentences(self) -> tuple[str, str]:
        """The first sentence of the function's docstring, and the rest of it."""
        text = " ".join((inspect.getdoc(self.handler) or "").split())
        first, stop, rest = text.partition(". ")
        return (first + "." if stop else first), rest

    @property
    def refusals(self) -> Mapping[int, Sequence[str]]:
        """By status, the types of the errors that the route may be answered with."""
        found: dict[int, set[str]] = defaultdict(set)
        for error in self._errors():
            found[self._status_of(error)].add(error.type)
        if self.parameters:
            found[404].add("unknown_endpoint")
        return {status: sorted(found[status]) for status in sorted(found)}

    @property
    def refusal(self) -> type[BaseModel]:
        """The form of its refusals."""
        if self.path.startswith(OPENAI):
            return OpenAIRefusal
        return AuthRefusal if self.path.startswith(AUTH) else Refusal

    def _status_of(self, error: type[TandemError]) -> int:
        return status_of(error("")) if self.path.startswith(OPENAI) else error.status

    def _errors(self) -> Iterator[type[TandemError]]:
        described = self.described
        if self.needs_key:
            yield from (Unauthenticated, TokenRefused, Overloaded)
        if self.need in ("change", "admin"):
            yield from (PermissionDenied, LimitExceeded)
        if self.has_body:
            yield from (MalformedPayload, InvalidRequest, PayloadTooLarge, RequestTimedOut)
        if described.queries or described.rules:
            yield InvalidRequest
        yield from described.errors


def operations(app: FastAPI, described: Mapping[Handler, Described]) -> Sequence[Operation]:
    """Every route by path and method. Raises `LookupError` for one that nobody described."""
    found = []
    for route in app.routes:
        if not isinstance(route, Route):
            raise LookupError(f"{route!r} is no route that could be described")
        if route.endpoint not in described:
            raise LookupError(f"{route.path}: {route.endpoint.__name__} has no description")
        for method in sorted((route.methods or set()) - {"HEAD"}):
            found.append(
                Operation(
                    method=method,
                    path=re.sub(r"\{(\w+):\w+\}", r"{\1}", route.path),
                    parameters=tuple(route.param_convertors),
                    handler=route.endpoint,
                    described=described[route.endpoint],
                )
            )
    return sorted(found, key=lambda o: (o.path, o.method))


def document(found: Iterable[Operation]) -> Json:
    """The whole document; the same operations give the same bytes."""
    found = list(found)
    models = sorted(
        {m for o in found for m in _models(o)}, key=lambda m: (m.__qualname__, m.__module__)
    )
    refs, definitions = models_json_schema(
        [(model, "validation") for model in models],
        ref_template="#/components/schemas/{model}",
    )
    schemas: Schemas = {model: dict(refs[model, "validation"]) for model in models}
    paths: dict[str, Json] = defaultdict(dict)
    for operation in found:
        paths[operation.path][operation.method.lower()] = _operation(operation, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Tandem", "version": __version__, "description": _ABOUT},
        "paths": dict(paths),
        "components": {
            "schemas": _sorted(definitions.get("$defs", {})),
            "securitySchemes": _SECURITY,
        },
    }


def _sorted(schemas: Mapping[str, object]) -> Json:
    return {name: schemas[name] for name in sorted(schemas)}


def _models(operation: Operation) -> Iterator[type[BaseModel]]:
    yield operation.refusal
    described = operation.described
    for alternative in described.takes:
        yield from alternative
    for answer in described.answers.values():
        yield from (each for each in answer.contents if not isinstance(each, Binary))


def _operation(operation: Operation, schemas: Schemas) -> Json:
    described = operation.described
    summary, about = operation.sentences
    said = " ".join([about, *described.rules]).strip()
    result: Json = {
        "operationId": operation.handler.__name__.strip("_"),
        "tags": [described.tag],
        "summary": summary,
    }
    if said:
        result["description"] = said
    if parameters := list(_parameters(operation)):
        result["parameters"] = parameters
    if operation.has_body:
        result["requestBody"] = _body(described, schemas)
    result["responses"] = _responses(operation, schemas)
    result["security"] = _security(operation)
    result["x-tandem-needs"] = operation.need
    return result


def _security(operation: Operation) -> list[Json]:
    if not operation.needs_key:
        return []
    return [{"ApiKey": []}, {"Bearer": []}]


def _parameters(operation: Operation) -> Iterator[Json]:
    for name in operation.parameters:
        text = {"type": "string", "minLength": 1}
        yield {"name": name, "in": "path", "required": True, "schema": text}
    for model in operation.described.queries:
        fields = model.model_json_schema()
        assert "$defs" not in fields, "a query has plain fields alone"
        for name, field in fields["properties"].items():
            yield {
                "name": name,
                "in": "query",
                "required": name in fields.get("required", ()),
                "schema": _plain(field),
            }
    for header in operation.described.headers:
        yield {
            "name": header.name,
            "in": "header",
            "required": False,
            "description": header.about,
            "schema": header.schema,
        }


def _plain(field: Mapping[str, object]) -> Json:
    """A query has no null: a field that may be null may be left out."""
    choices = field.get("anyOf")
    if isinstance(choices, list):
        kept = [each for each in choices if each != {"type": "null"}]
        if len(kept) == 1:
            rest = {k: v for k, v in field.items() if k not in ("anyOf", "default")}
            return {**rest, **kept[0]}
    return dict(field)


def _body(described: Described, schemas: Schemas) -> Json:
    if described.takes_binary is not None:
        binary = described.takes_binary
        return {"required": True, "content": {binary.media: _binary(binary)}}
    alternatives = [
        schemas[models[0]] if len(models) == 1 else {"allOf": [schemas[m] for m in models]}
        for models in described.takes
    ]
    schema = alternatives[0] if len(alternatives) == 1 else {"anyOf": alternatives}
    return {"required": described.body_needed, "content": {"application/json": {"schema": schema}}}


def _binary(binary: Binary) -> Json:
    return {"schema": {"type": "string", "format": "binary", "description": binary.about}}


def _responses(operation: Operation, schemas: Schemas) -> Json:
    answers, refusals = operation.described.answers, operation.refusals
    result: Json = {}
    for status in sorted({*answers, *refusals}):
        answer, types = answers.get(status), refusals.get(status, ())
        contents = [*(answer.contents if answer else ()), *([operation.refusal] if types else ())]
        result[str(status)] = {
            "description": _about(answer, types),
            **({"headers": headers} if (headers := _headers(status)) else {}),
            **({"content": _contents(contents, schemas)} if contents else {}),
        }
    return result


def _about(answer: Answer | None, types: Sequence[str]) -> str:
    about = [answer.about or ("" if answer.contents else _NO_BODY)] if answer else []
    if types:
        about.append(f"Refused: {', '.join(types)}.")
    return " ".join(filter(None, about)) or "As asked."


def _headers(status: int) -> Json:
    match status:
        case 401:
            return {"WWW-Authenticate": {"required": True, "schema": {"type": "string"}}}
        case 429:
            return {"Retry-After": {"required": True, "schema": {"type": "string"}}}
        case _:
            return {}


def _contents(contents: Sequence[Content], schemas: Schemas) -> Json:
    result: Json = {}
    plain = [schemas[each] for each in contents if not isinstance(each, Binary)]
    if plain:
        schema = plain[0] if len(plain) == 1 else {"anyOf": plain}
        result["application/json"] = {"schema": schema}
    for each in contents:
        if isinstance(each, Binary) and each.media not in result:
            result[each.media] = _binary(each)
    return result
