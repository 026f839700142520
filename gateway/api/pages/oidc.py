"""Signing in at a provider of OpenID Connect."""

from __future__ import annotations

import re
import secrets
import time
from typing import Annotated

from fastapi import Query
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from gateway.api.dependencies import Access
from gateway.api.pages.routing import PageRouter, cookie_name, is_browser, render_for
from gateway.api.pages.sign_in import own_path, set_cookie, sign_in_browser, sign_in_form
from gateway.core import Gateway
from gateway.owners.auth.audit import UNKNOWN, Entry
from gateway.owners.auth.grants import grant_access
from gateway.owners.auth.oidc import FLOW_SECONDS, OidcProvider, SignInFlow
from tandem.errors import InvalidRequest, PermissionDenied, SignInFailed, TandemError

router = PageRouter()

_PATH = "/sign-in/oidc"
_CALLBACK = f"{_PATH}/callback"


@router.operation("GET", _PATH, role="none", errors=[SignInFailed])
async def begin_oidc(request: Request, next: Annotated[str, Query()] = "/") -> Response:
    """Send the browser to the provider. `next` is the page to come back to."""
    provider, access = _provider(request), Access(request)
    secret = request.cookies.get(_cookie(request)) or secrets.token_urlsafe(32)
    key = access.gateway.identity.signing_key
    flow = SignInFlow.start_flow(key, secret, next=own_path(next), now=time.time())
    try:
        address = await provider.address_of(flow, redirect_uri=access.base_url + _CALLBACK)
    except SignInFailed as failure:
        return _refusal(request, failure, next=flow.next)
    response = RedirectResponse(address, 303, headers={"Cache-Control": "no-store"})
    # Lax: the provider's redirect comes from another site, and needs the cookie.
    set_cookie(
        request,
        response,
        _cookie(request),
        secret,
        seconds=FLOW_SECONDS,
        samesite="lax",
        path=_PATH,
    )
    return response


@router.operation(
    "GET", _CALLBACK, role="none", errors=[InvalidRequest, PermissionDenied, SignInFailed]
)
async def finish_oidc(
    request: Request,
    state: Annotated[str, Query()] = "",
    code: Annotated[str, Query()] = "",
    error: Annotated[str, Query()] = "",
) -> Response:
    """Take the provider's answer, and sign the person in or say why not.

    The answer is a page that leads on. After a redirect from another site, a browser would not send
    the session's cookie, which is SameSite=strict."""
    provider, access = _provider(request), Access(request)
    gateway, flow = access.gateway, None
    try:
        secret, key = request.cookies.get(_cookie(request), ""), gateway.identity.signing_key
        flow = SignInFlow.resume_flow(key, secret, state=state, now=time.time())
        if not code:
            why = f" ({error})" if re.fullmatch(r"\w{1,60}", error) else ""
            raise PermissionDenied(f"the provider {provider.host} has not signed you in{why}")
        uri = access.base_url + _CALLBACK
        claims = await provider.claims_of(flow, code=code, redirect_uri=uri)
        caller = await grant_access(claims, settings=provider.settings, keys=gateway.keys)
    except (InvalidRequest, PermissionDenied, SignInFailed) as refusal:
        return _refusal(request, refusal, next=flow.next if flow else "/")
    response = render_for(request, "signed_in.html", next=flow.next)
    await sign_in_browser(request, response, caller, provider=provider.host, role=caller.role)
    return response


def _refusal(request: Request, refusal: TandemError, *, next: str) -> Response:
    """Record the refusal, and show it above the form for API keys."""
    gateway: Gateway = request.app.state.gateway
    address = request.client.host if request.client else ""
    detail = {"reason": refusal.message[:200]}
    entry = Entry(UNKNOWN, "page_sign_in", request.url.path, address, refusal.status, detail)
    gateway.audit.record(entry)
    if not is_browser(request):
        raise refusal
    return sign_in_form(request, next, status=refusal.status, problem=refusal.message)


def _provider(request: Request) -> OidcProvider:
    gateway: Gateway = request.app.state.gateway
    if gateway.oidc is None:
        raise HTTPException(404)
    return gateway.oidc


def _cookie(request: Request) -> str:
    return f"{cookie_name(request)}_oidc"
