"""The type of the tables that describe the routes, by the function that answers them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from starlette.requests import Request
from starlette.responses import Response

from gateway.api.description.base import Described

Handler = Callable[[Request], Awaitable[Response]]
Table = Mapping[Handler, Described]
