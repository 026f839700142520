"""Signing in and out, and the static files."""

from __future__ import annotations

import secrets
from typing import Annotated, Literal

from fastapi import Query
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, RedirectResponse, Response

from gateway.api.fields import PathText
from gateway.api.pages.routing import (
    FORM_CONTENT,
    PageRouter,
    check_token,
    cookie_name,
    form_token,
    is_browser,
    page_token,
    read_form,
    render_for,
)
from gateway.api.pages.templates import HEADERS, static_files
from gateway.api.request_body import FORM_BODY
from gateway.api.routing import KEY_REFUSED, check_role, is_from_this_machine
from gateway.core import Gateway
from gateway.owners.auth.audit import Entry
from gateway.owners.auth.identity import Caller
from gateway.owners.auth.page_sessions import SESSION_SECONDS
from tandem.errors import InvalidRequest, PermissionDenied, Unauthenticated

router = PageRouter()

_FOREVER = "public, max-age=31536000, immutable"


@router.operation("GET", "/static/{name}", role="none")
async def static_file(name: PathText) -> Response:
    """Return a style sheet, a script or a picture."""
    file = static_files().get(name)
    if file is None:
        raise HTTPException(404)
    return FileResponse(file, headers={**HEADERS, "Cache-Control": _FOREVER})


@router.operation("GET", "/sign-in", role="none")
async def sign_in_page(request: Request, next: Annotated[str, Query()] = "/") -> Response:
    """Return the form for an API key. `next` is the page that was asked for."""
    return sign_in_form(request, next)


# A browser's form is not JSON.
@router.operation(
    "POST",
    "/sign-in",
    role="none",
    audit=None,
    errors=[Unauthenticated, PermissionDenied],
    raw=FORM_CONTENT,
    bounds=FORM_BODY,
)
async def sign_in(request: Request) -> Response:
    """Sign the browser in by a key, or by the code of a link of `tandem up`."""
    gateway: Gateway = request.app.state.gateway
    form = await read_form(request)
    asked = form.get("next", "/")
    try:
        check_token(form.get("form_token", ""), request.cookies.get(_form_cookie(request), ""))
        caller = _identify(request, gateway, form)
    except (InvalidRequest, PermissionDenied, Unauthenticated) as refusal:
        if not is_browser(request):
            raise
        return sign_in_form(request, asked, status=refusal.status, problem=refusal.message)
    response = RedirectResponse(own_path(asked), status_code=303)
    await sign_in_browser(request, response, caller)
    response.delete_cookie(_form_cookie(request))
    return response


# A browser's form is not JSON.
@router.operation(
    "POST", "/sign-out", role="reader", audit=None, raw=FORM_CONTENT, bounds=FORM_BODY
)
async def sign_out(request: Request) -> Response:
    """End the browser's session."""
    await request.app.state.gateway.page_sessions.sign_out(page_token(request))
    response = RedirectResponse("/sign-in", status_code=303)
    response.delete_cookie(cookie_name(request))
    return response


def _identify(request: Request, gateway: Gateway, form: dict[str, str]) -> Caller:
    """Raise `Unauthenticated` for a bad key, counted as elsewhere, or `PermissionDenied` for one
    that may not read."""
    key = form.get("key", "").strip().encode()
    if code := form.get("code"):
        if not is_from_this_machine(request.scope):
            raise InvalidRequest("the link works only on the gateway's machine")
        key = gateway.page_sessions.use_code(code)
    try:
        caller = gateway.identity.identify(key)
    except Unauthenticated as refusal:
        setattr(request.state, KEY_REFUSED, refusal.type)
        raise
    check_role(caller, "reader")
    return caller


async def sign_in_browser(
    request: Request, response: Response, caller: Caller, **detail: str
) -> None:
    """Begin a session, whose cookie goes with the response."""
    gateway: Gateway = request.app.state.gateway
    token = await gateway.page_sessions.sign_in(caller)
    address = request.client.host if request.client else ""
    about = {"key": caller.key_id, **detail}
    gateway.audit.record(Entry(caller.urn, "page_sign_in", caller.key_id, address, 303, about))
    set_cookie(request, response, cookie_name(request), token)


def own_path(asked: str) -> str:
    """Return a path of this server to go to, "/" in place of an address of another one."""
    plain = asked.startswith("/") and asked[1:2] not in ("/", "\\") and asked.isprintable()
    return asked if plain else "/"


def sign_in_form(request: Request, asked: str, *, status: int = 200, problem: str = "") -> Response:
    secret = request.cookies.get(_form_cookie(request)) or secrets.token_urlsafe(16)
    response = render_for(
        request,
        "sign_in.html",
        status=status,
        form_token=form_token(secret),
        next=own_path(asked),
        problem=problem,
        provider=provider.host if (provider := request.app.state.gateway.oidc) else "",
    )
    set_cookie(request, response, _form_cookie(request), secret)
    return response


def _form_cookie(request: Request) -> str:
    return f"{cookie_name(request)}_form"


def set_cookie(
    request: Request,
    response: Response,
    name: str,
    value: str,
    *,
    seconds: int = SESSION_SECONDS,
    samesite: Literal["strict", "lax"] = "strict",
    path: str = "/",
) -> None:
    public_url = request.app.state.gateway.settings.public_url or ""
    response.set_cookie(
        name,
        value,
        max_age=seconds,
        path=path,
        httponly=True,
        samesite=samesite,
        secure=request.url.scheme == "https" or public_url.startswith("https:"),
    )
