"""Reads the paths of requests with fewer or more slashes than the routes have.

Clients that join a base address and a path often write `//v1/models` or `/v1/models/`. Repeated
slashes count as one, and a slash at the end does not count. This happens before any rule looks at
the path, and without a redirect, whose address a proxy may not reach.
"""

from __future__ import annotations

import re
from urllib.parse import unquote

from starlette.types import ASGIApp, Receive, Scope, Send

_REPEATED = re.compile(r"(?<![:/])/{2,}")
"""Slashes that count as one; those of `tinker://` are a part of a model's name."""


class PathBoundary:
    """Hands every request on with the path that the routes have."""

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
    """Return a path, still encoded, with single slashes and none at its end. An encoded slash is a
    part of a name and stays.

    Literal example: `plain_path("//v1//models/")` is `"/v1/models"`.
    """
    return _REPEATED.sub("/", path).rstrip("/") or "/"
