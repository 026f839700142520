"""Routers with roles, audit actions and errors.

`Router.operation` registers a path operation with its role, its action in the audit log and its
errors. The OpenAPI operation holds them (`x-tandem-…`) for the middleware, the documentation and
the tests.

FastAPI reads bodies before it resolves dependencies. So the role check and the bounded read come
first."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from types import EllipsisType, NoneType
from typing import Any, Literal, NoReturn, TypeVar, cast, get_type_hints

from fastapi import APIRouter
from fastapi.datastructures import Default
from fastapi.params import Query
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from gateway.api.fields import Refusal
from gateway.api.http_connection import VITAL
from gateway.api.request_body import (
    FIELDS_BODY,
    JSON,
    BodyBounds,
    BoundedRequest,
    check_content_type,
)
from gateway.core import Gateway
from gateway.owners.auth.identity import Caller, Reach
from gateway.owners.auth.keys import Role as KeyRole
from gateway.owners.limits import Reservation
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
from tandem.protocol.http_host import hosts_of, is_loopback, may_be_site

Role = Literal[
    "none", "local", "signature", "metrics", "reader", "ci", "member", "maintainer", "admin"
]
"""The required key: `none` needs no key, `local` none from this machine and any from elsewhere, and
`signature` a signed address. Other values need a key with this role or one that includes it."""
OPEN_ROLES = frozenset({"none", "local", "signature"})
_INCLUDES: Mapping[KeyRole, frozenset[Role]] = {
    "metrics": frozenset({"metrics"}),
    "reader": frozenset({"reader"}),
    "ci": frozenset({"reader", "ci"}),
    "member": frozenset({"reader", "ci", "member"}),
    "maintainer": frozenset({"reader", "ci", "member", "maintainer"}),
    "admin": frozenset({"metrics", "reader", "ci", "member", "maintainer", "admin"}),
}

ROLE, AUDIT, RULES = "x-tandem-role", "x-tandem-audit", "x-tandem-rules"
OVERSEEN = "x-tandem-overseen"
RAW, BOUNDS = "x-tandem-raw", "x-tandem-bounds"

KEY_REFUSED = "key_refused"
"""In a request's state: the error type of its refused key."""
_FORWARDED = frozenset({b"forwarded", b"x-forwarded-for"})

Method = Literal["GET", "POST", "PUT", "PATCH", "DELETE"]
Responses = dict[int | str, dict[str, Any]]
Endpoint = TypeVar("Endpoint", bound=Callable[..., Awaitable[object]])


class PathOperation(APIRoute):
    role: Role
    audit: str | None
    """The action in the audit log, None for no entry."""
    overseen: bool

    @property
    def method(self) -> str:
        return next(iter(self.methods - {"HEAD"}))

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse a request without a key of the required role. Bound each owner's open requests,
        except vital ones, and release the body's memory."""
        gateway = cast(Gateway, scope["app"].state.gateway)
        state = scope.setdefault("state", {})
        owner = ""
        if not self._is_open(scope):
            caller = self.caller_of(scope)
            if self.role not in OPEN_ROLES:
                check_role(caller, self.role)
                state["caller"] = replace(caller, reach=self.reach_of(caller.role) or "own")
            owner = caller.owner
        vital = scope["path"] in VITAL
        open_request = gateway.limits.requests.reserve(owner, forced=vital)
        body = state["body_reservation"] = Reservation(gateway.limits.bodies, owner, amount=0)
        try:
            await super().handle(scope, receive, send)
        finally:
            body.release()
            open_request.release()

    def reach_of(self, role: KeyRole) -> Reach | None:
        """Return the things that a key of this role reaches, None if it is refused."""
        if self.role not in OPEN_ROLES | _INCLUDES[role]:
            return None
        if role in ("admin", "metrics") or (role == "maintainer" and self.overseen):
            return "all"
        return "blueprints" if role == self.role == "ci" else "own"

    def caller_of(self, scope: Scope) -> Caller:
        """Return the caller. Raises `Unauthenticated`."""
        return identify(scope)

    def _is_open(self, scope: Scope) -> bool:
        """Return whether a request needs no key. A `local` route needs none from this machine,
        unless a proxy forwards the request."""
        if self.role != "local":
            return self.role in OPEN_ROLES
        return is_from_this_machine(scope)

    def get_route_handler(self) -> Callable[[Request], Coroutine[object, object, Response]]:
        """Called by FastAPI at registration. Raises `TypeError` for a route without a role."""
        facts: dict[str, Any] = self.openapi_extra or {}
        if ROLE not in facts:
            raise TypeError(f"the route {self.name} ({self.path}) states no role")
        self.role, self.audit = facts[ROLE], facts.get(AUDIT)
        self.overseen = facts.get(OVERSEEN, False)
        if "GET" in self.methods:
            self.methods.add("HEAD")
        bounds: BodyBounds = facts[BOUNDS]
        handle = self.endpoint if RAW in facts else super().get_route_handler()
        body = self.body_field
        required = body is not None and body.field_info.is_required()

        async def checked(request: Request) -> Response:
            read = isinstance(request, BoundedRequest)  # perhaps its body was read before
            bounded = request if read else BoundedRequest(request.scope, request.receive, bounds)
            if body is not None:
                check_content_type(request.headers.get("content-type"))
                if (await bounded.body() or required) and await bounded.json() is None:
                    raise InvalidRequest(  # FastAPI takes null for no body
                        "the body is null; send a JSON object"
                    )
            return cast(Response, await handle(bounded))

        return checked


class Refuses:
    """The errors and rules of a dependency. It stands in an `Annotated` and applies to its
    operations."""

    def __init__(self, *errors: type[TandemError], rules: Sequence[str] = ()) -> None:
        self.errors = errors
        self.rules = rules


class Router(APIRouter):
    """`refusal` is the form of its errors, `status_of` their status (the SDK's by default). Only
    `documented` operations are in the OpenAPI document."""

    def __init__(
        self,
        prefix: str = "",
        *,
        tag: str,
        refusal: type[BaseModel] = Refusal,
        status_of: Callable[[TandemError], int] = lambda error: error.status,
        route_class: type[PathOperation] = PathOperation,
        documented: bool = True,
    ) -> None:
        super().__init__(
            prefix=prefix,
            tags=[tag],
            route_class=route_class,
            include_in_schema=documented,
            strict_content_type=False,
        )
        self._refusal = refusal
        self._status_of = status_of

    def operation(
        self,
        method: Method,
        path: str,
        *,
        role: Role,
        overseen: bool = False,
        audit: str | EllipsisType | None = ...,
        errors: Sequence[type[TandemError]] = (),
        rules: Sequence[str] = (),
        response_model: object = ...,
        responses: Responses | None = None,
        bounds: BodyBounds = FIELDS_BODY,
        body_schema: type[BaseModel] | None = None,
        raw: Mapping[str, object] | None = None,
    ) -> Callable[[Endpoint], Endpoint]:
        """Register a path operation. One that returns None answers with 204.

        Args:
          role: the required key.
          overseen: a maintainer reaches the things of all owners, as an admin does everywhere.
          audit: the action in the audit log (RESOURCE_VERB), or None if no owner's things change.
            Required for all methods but GET.
          errors: its errors beyond the common ones and its dependencies'.
          rules: rules that a schema cannot express. Without them, a request that fits the schema
            is never refused with 400.
          response_model: if it differs from the return annotation.
          responses: further responses, as in FastAPI.
          bounds: of its body.
          body_schema: body fields that the endpoint validates itself.
          raw: the request's OpenAPI content, for an endpoint that takes the `Request` and returns
            the `Response` without FastAPI's parsing. Each use gives the reason in a comment."""
        if audit is ... and method != "GET":
            raise TypeError(f"the route {method} {path} must state its action in the audit log")
        stated: dict[str, object] = {
            ROLE: role,
            OVERSEEN: overseen or None,
            AUDIT: None if audit is ... else audit,
            BOUNDS: bounds,
            RAW: None if raw is None else True,
            "security": None if role in OPEN_ROLES else [{"ApiKey": []}, {"Bearer": []}],
        }
        facts = {key: fact for key, fact in stated.items() if fact is not None}
        if raw is not None:
            facts["requestBody"] = {"required": True, "content": raw}
        if body_schema is not None:
            reference, definitions = _schema(body_schema)
            schema = {"allOf": [reference], "$defs": definitions}
            facts["requestBody"] = {"content": {JSON: {"schema": schema}}}

        def register(endpoint: Endpoint) -> Endpoint:
            hints = get_type_hints(endpoint, include_extras=True)
            answered = hints.pop("return")
            notes = [note for hint in hints.values() for note in getattr(hint, "__metadata__", ())]
            refused = [note for note in notes if isinstance(note, Refuses)]
            raised = [*_common_errors(role), *errors, *(e for note in refused for e in note.errors)]
            bodies = (getattr(hint, "__origin__", hint) for hint in hints.values())
            if raw is not None or any(_is_class(body, BaseModel) for body in bodies):
                raised += (MalformedPayload, InvalidRequest, PayloadTooLarge, RequestTimedOut)
            if found := [*rules, *(rule for note in refused for rule in note.rules)]:
                facts[RULES] = found
            if found or any(isinstance(note, Query) for note in notes):
                raised.append(InvalidRequest)
            if response_model is not ...:
                answered = response_model
            plain = answered in (NoneType, NoReturn) or _is_class(answered, Response)
            self.add_api_route(
                path,
                endpoint,
                methods=[method],
                status_code=204 if answered is NoneType else 200,
                response_model=None if plain else answered,
                response_model_exclude_unset=True,
                response_class=Response if plain else Default(JSONResponse),
                responses=self._responses(raised, path, responses or {}),
                operation_id=endpoint.__name__,
                openapi_extra=facts,
            )
            return endpoint

        return register

    def _responses(
        self, errors: Iterable[type[TandemError]], path: str, others: Responses
    ) -> Responses:
        types: dict[int, set[str]] = defaultdict(set)
        for error in errors:
            types[self._status_of(error(""))].add(error.type)
        if "{" in path:
            types[404].add("unknown_endpoint")
        found: Responses = dict(others)
        for status, names in types.items():
            refused = f"Refused: {', '.join(sorted(names))}."
            other = others.get(status, {})
            model = other.get("model")
            found[status] = {
                "description": f"{other.get('description', '')} {refused}".strip(),
                "model": self._refusal if model is None else model | self._refusal,
                "headers": _HEADERS.get(status, {}),
            }
        return found


def is_from_this_machine(scope: Scope) -> bool:
    """Return whether a program on this machine asks for itself, without a proxy. Its Host may not
    be a web site's, because a page may run in a local browser."""
    client = scope.get("client")
    passed_on = any(name in _FORWARDED for name, _ in scope["headers"])
    near = client is not None and is_loopback(client[0]) and not passed_on
    return near and not any(map(may_be_site, hosts_of(scope["headers"])))


def identify(scope: Scope) -> Caller:
    """Return the caller by the request's key (X-API-Key, or Authorization: Bearer) and store it in
    the request's state. Raises `Unauthenticated`."""
    gateway = cast(Gateway, scope["app"].state.gateway)
    state = scope.setdefault("state", {})
    try:
        caller = state["caller"] = gateway.identity.identify(credential_of(scope))
    except Unauthenticated as refusal:
        state[KEY_REFUSED] = refusal.type
        raise
    return caller


def credential_of(scope: Scope) -> bytes:
    headers: dict[bytes, bytes] = dict(reversed(scope["headers"]))  # the first of several
    if (key := headers.get(b"x-api-key")) is not None:
        return key
    scheme, _, credential = headers.get(b"authorization", b"").partition(b" ")
    return credential.strip() if scheme.lower() == b"bearer" else b""


def check_role(caller: Caller, role: Role) -> None:
    """Raise `PermissionDenied` with the roles that suffice."""
    if role not in _INCLUDES[caller.role]:
        *others, last = (each for each, included in _INCLUDES.items() if role in included)
        raise PermissionDenied(
            f"this needs a key with the role {', '.join(others)}{' or ' if others else ''}{last}; "
            f"{caller.key_id} is a key with the role {caller.role} (an admin makes keys with "
            "`tandem keys create`)"
        )


def file_response(media_type: str, description: str) -> dict[str, Any]:
    return {"content": {media_type: {"schema": binary(description)}}}


def json_content(model: type[BaseModel]) -> dict[str, Any]:
    reference, definitions = _schema(model)
    return {JSON: {"schema": {**reference, "$defs": definitions}}}


def model_response(model: BaseModel, *, status: int = 200) -> Response:
    return Response(model.model_dump_json(), status_code=status, media_type=JSON)


def binary(description: str) -> dict[str, object]:
    return {"type": "string", "format": "binary", "description": description}


_RETRY_AFTER: dict[str, object] = {"Retry-After": {"required": True, "schema": {"type": "string"}}}
_HEADERS: Mapping[int, dict[str, object]] = {
    401: {"WWW-Authenticate": {"required": True, "schema": {"type": "string"}}},
    429: _RETRY_AFTER,
    503: _RETRY_AFTER,
    507: _RETRY_AFTER,
}


def _schema(model: type[BaseModel]) -> tuple[dict[str, str], dict[str, object]]:
    """Return a reference to the model's schema, and its definitions (see `description`)."""
    form = "#/components/schemas/{model}"
    schema = model.model_json_schema(ref_template=form)
    definitions = schema.pop("$defs", {})
    name = model.__name__
    return {"$ref": form.format(model=name)}, {name: schema, **definitions}


def _common_errors(role: Role) -> Iterable[type[TandemError]]:
    if role not in OPEN_ROLES:
        yield from (Unauthenticated, TokenRefused, Overloaded)
        yield PermissionDenied
    if role in ("ci", "member", "maintainer", "admin"):
        yield LimitExceeded


def _is_class(hint: object, of: type) -> bool:
    return isinstance(hint, type) and issubclass(hint, of)
