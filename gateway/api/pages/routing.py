"""Routes of pages: callers by cookie, form tokens, and refusals that people can read."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Callable, Coroutine
from typing import Annotated, TypeVar, cast
from urllib.parse import quote, unquote_to_bytes

from fastapi import Depends
from fastapi.exceptions import RequestValidationError
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.types import Receive, Scope, Send

from gateway.api.dependencies import Access
from gateway.api.pages.run_views import RunViews
from gateway.api.pages.templates import HEADERS, fragment
from gateway.api.request_body import FORM_BODY, JSON, BodyBounds, BoundedRequest, fault
from gateway.api.routing import BOUNDS, KEY_REFUSED, PathOperation, Responses, Router, identify
from gateway.core import Gateway
from gateway.owners.auth.identity import Caller
from tandem.errors import InvalidRequest, TandemError, Unauthenticated

Value = TypeVar("Value")

FORM_CONTENT: dict[str, object] = {
    "application/x-www-form-urlencoded": {"schema": {"type": "object"}}
}
_MEDIA = ("text/html", "text/event-stream", JSON, "text/css", "text/javascript", "image/svg+xml")
_ANSWERS: Responses = {
    200: {"description": "A page or its parts", "content": {media: {} for media in _MEDIA}},
    303: {"description": "To another page"},
}
_MOST_FIELDS = 100
_PIECE = 16 * 2**10
_STREAM = "live_stream"
_SIGN_IN = "/sign-in"


class PageOperation(PathOperation):
    """A path operation for browsers, which have a cookie in place of a key. A changing request with
    a cookie needs the page's form token."""

    def caller_of(self, scope: Scope) -> Caller:
        return _identify_browser(scope)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().handle(scope, receive, send)
        except TandemError as error:  # before the body was read
            if not is_browser(request := Request(scope)):
                raise
            await _refusal(request, error)(scope, receive, send)
        finally:
            if stream := scope.get("state", {}).get(_STREAM):
                stream.release()

    def get_route_handler(self) -> Callable[[Request], Coroutine[object, object, Response]]:
        handle = super().get_route_handler()
        bounds = cast(BodyBounds, (self.openapi_extra or {})[BOUNDS])

        async def page(plain: Request) -> Response:
            request = BoundedRequest(plain.scope, plain.receive, bounds)
            try:
                if request.method not in ("GET", "HEAD") and (token := page_token(request)):
                    check_token((await read_form(request)).get("form_token", ""), token)
                return await handle(request)
            except (TandemError, RequestValidationError) as error:
                if not is_browser(request):
                    raise
                return _refusal(request, error)

        return page


class PageRouter(Router):
    """A router whose operations answer with pages. docs/api.md does not list them."""

    def __init__(self) -> None:
        super().__init__(tag="Pages", route_class=PageOperation, documented=False)
        self.responses = _ANSWERS


class Page(Access):
    """What an operation of a page needs: the gateway, the caller, its views, and `render`."""

    @property
    def views(self) -> RunViews:
        return cast(RunViews, self._request.app.state.run_views)

    def render(self, template: str, *, status: int = 200, **data: object) -> Response:
        """Return a page. Each template also gets the data of `_about`."""
        return render_for(self._request, template, status=status, **data)

    async def draw(self, make: Callable[[], Value]) -> Value:
        """Make a large page or parts of one in a thread, in turns of the owners."""
        async with self.views.drawing.turn(self.caller.owner):
            return await asyncio.to_thread(make)

    def fragment(self, template: str, **data: object) -> str:
        """Return a part of a page, with the same data."""
        return fragment(template, **{**_about(self._request), **data})

    def check_still_signed_in(self) -> None:
        """Raise `Unauthenticated` after a sign-out, or after the end of the key or token."""
        _identify_browser({**self._request.scope, "state": {}})  # a refusal counts no bad key

    def hold_stream(self) -> None:
        """Count the answer as one of the owner's streams until its end. Raises `Overloaded`."""
        stream = self.views.streams.reserve(self.caller.owner)
        setattr(self._request.state, _STREAM, stream)


async def _page(request: Request) -> Page:
    return Page(request)


PageDep = Annotated[Page, Depends(_page)]


def render_for(request: Request, template: str, *, status: int = 200, **data: object) -> Response:
    """Return a page, which no cache keeps, because the next person may not see it."""
    text = fragment(template, **{**_about(request), **data})
    return HTMLResponse(text, status, headers={**HEADERS, "Cache-Control": "no-store"})


def _about(request: Request) -> dict[str, object]:
    """Return the data of each template. With `app.state.files_only` there are only runs, without
    checkpoints, events and usage."""
    token = page_token(request)
    files_only = getattr(request.app.state, "files_only", False)
    return {
        "caller": getattr(request.state, "caller", None),
        "files_only": files_only,
        "form_token": form_token(token) if token else "",
        "path": request.url.path,
        "has_playground": not files_only and request.app.state.gateway.settings.playground.runs > 0,
    }


def cookie_name(request: Request) -> str:
    """Return the session's cookie. Gateways on one host share cookies, so the port is in it."""
    return f"tandem_{request.url.port or request.url.scheme}"


def page_token(request: Request) -> str:
    """Return the token of the signed-in session, "" for a request with a key or without one."""
    return getattr(request.state, "page_token", "")


def form_token(secret: str) -> str:
    """Return the token of the forms that are shown to a cookie's holder. Another site can read
    neither."""
    return hmac.new(secret.encode(), b"form", hashlib.sha256).hexdigest()


async def read_form(request: Request) -> dict[str, str]:
    """Return the form's fields, the last of equal names. A second call reads nothing. Raises
    `InvalidRequest`, and as `BoundedRequest.read`."""
    state = request.state
    if not hasattr(state, "form"):
        state.form = await cast(BoundedRequest, request).read(_parse_form, quickly=FORM_BODY.sent)
    return cast(dict[str, str], state.form)


def _parse_form(body: bytes) -> dict[str, str]:
    fields = body.split(b"&", _MOST_FIELDS)
    if len(fields) > _MOST_FIELDS:
        raise InvalidRequest(f"the form has more than {_MOST_FIELDS} fields")
    pairs = (field.partition(b"=") for field in fields)
    return {_decoded(name): _decoded(value) for name, _, value in pairs if value}


def _decoded(raw: bytes) -> str:
    """Decode a part of a form in short pieces, as Python holds the interpreter lock for each."""
    pieces, start = list[bytes](), 0
    while start < len(raw):
        end = start + _PIECE
        if (cut := raw.rfind(b"%", end - 2, end)) > start:
            end = cut
        pieces.append(unquote_to_bytes(raw[start:end].replace(b"+", b" ")))
        start = end
    return b"".join(pieces).decode("utf-8", "replace")


def check_token(sent: str, secret: str) -> None:
    """Raise `InvalidRequest` for a form of another site or of an earlier session."""
    if not secret or not hmac.compare_digest(sent.encode(), form_token(secret).encode()):
        raise InvalidRequest("the form is too old; load the page again and repeat your entry")


def _identify_browser(scope: Scope) -> Caller:
    """Return the caller by the cookie or by a key. Raises `Unauthenticated`. In `tandem view`,
    everybody is `app.state.viewer`."""
    request = Request(scope)
    state = scope.setdefault("state", {})
    if viewer := getattr(request.app.state, "viewer", None):
        state["caller"] = viewer
        return cast(Caller, viewer)
    token = request.cookies.get(cookie_name(request))
    if not token or {"x-api-key", "authorization"} & {*request.headers}:
        return identify(scope)
    gateway = cast(Gateway, scope["app"].state.gateway)
    try:
        caller = state["caller"] = gateway.page_sessions.caller_of(token)
    except Unauthenticated as refusal:
        state[KEY_REFUSED] = refusal.type
        raise
    state["page_token"] = token
    return caller


def unknown_page(request: Request) -> Response | None:
    """Return the answer to a browser with an unknown address, None for other clients."""
    if not is_browser(request):
        return None
    try:
        _identify_browser(request.scope)
    except Unauthenticated as refusal:
        return _refusal(request, refusal)
    message = "there is no page at this address"
    return render_for(request, "refusal.html", status=404, message=message)


def is_browser(request: Request) -> bool:
    return "text/html" in request.headers.get("accept", "")


def _refusal(request: Request, error: TandemError | RequestValidationError) -> Response:
    """Send a stranger to the sign-in page, and show other refusals as a page."""
    if isinstance(error, Unauthenticated):
        asked = request.url.path if request.method == "GET" else "/"
        if asked != "/" and request.url.query:
            asked += f"?{request.url.query}"
        to = f"{_SIGN_IN}?next={quote(asked)}" if asked != "/" else _SIGN_IN
        return RedirectResponse(to, status_code=303, headers={"Cache-Control": "no-store"})
    if isinstance(error, RequestValidationError):
        first = error.errors()[0]
        error = InvalidRequest(fault(first["loc"][1:], first["msg"]))
    return render_for(request, "refusal.html", status=error.status, message=error.message)
