"""Normalizes slashes in request paths, since clients often write `//v1/models` or `/v1/models/`.

Repeated slashes count as one, and a final slash does not count. This precedes all checks, without a
redirect, which a proxy may not reach."""

from __future__ import annotations

import re
from urllib.parse import unquote

from starlette.types import ASGIApp, Receive, Scope, Send

_REPEATED = re.compile(r"(?<![:/])/{2,}")
"""Slashes that count as one, except those of `tinker://` in a model's name."""


class PathBoundary:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            sent = scope["raw_path"].decode("latin-1")
            plain = plain_path(sent)
            if plain != sent:
                raw = plain.encode("latin-1")
                scope = {**scope, "path": unquote(plain), "raw_path": raw}
        await self._app(scope, receive, send)


def plain_path(path: str) -> str:
    """Return an encoded path with single slashes and none at its end. Encoded slashes stay, as
    parts of names.

    Example: `plain_path("//v1//models/")` is `"/v1/models"`."""
    return _REPEATED.sub("/", path).rstrip("/") or "/"
