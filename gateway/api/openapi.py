"""The OpenAPI document: FastAPI's own, and the route that serves it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from starlette.requests import Request
from starlette.responses import Response

from gateway.api.errors import json_response
from gateway.api.routing import Router, file_response
from tandem import __version__

_ABOUT = (
    "The routes of a Tandem gateway: those of the `tinker` SDK under /api/v1, those for OpenAI's "
    "clients under /v1, Tandem's own under /api/tandem/v1. A request that is refused is answered "
    "with `{error, type, category}`; an accepted operation that fails is answered with 200 and "
    "the same fields."
)

router = Router(tag="Tandem")


@router.operation(
    "GET",
    "/openapi.json",
    role="local",
    responses={200: file_response("application/json", "An OpenAPI 3.1 document")},
)
async def openapi(request: Request) -> Response:
    """Return this description. It holds nothing of this server but its version."""
    return json_response(request.app.openapi())


def document(app: FastAPI) -> dict[str, Any]:
    """Return FastAPI's document, built once, without what the gateway does otherwise: wrong
    fields are refused with 400 (see `errors.py`), and HEAD is GET without a body."""
    if app.openapi_schema is None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Duplicate Operation ID")  # of GET, and its HEAD
            found = get_openapi(
                title="Tandem",
                version=__version__,
                description=_ABOUT,
                routes=app.routes,
                separate_input_output_schemas=False,
            )
        schemas = found["components"]["schemas"]
        for item in found["paths"].values():
            item.pop("head", None)
            for operation in item.values():
                operation["responses"].pop("422", None)
                operation.pop("x-tandem-raw", None)
                for definitions in _inline_definitions(operation.get("requestBody")):
                    schemas.update(definitions)
        for name in ("HTTPValidationError", "ValidationError"):
            schemas.pop(name, None)
        found["components"]["schemas"] = dict(sorted(schemas.items()))
        found["components"]["securitySchemes"] = {
            "ApiKey": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
            "Bearer": {"type": "http", "scheme": "bearer"},
        }
        app.openapi_schema = found
    return app.openapi_schema


def _inline_definitions(node: object) -> Iterator[dict[str, Any]]:
    """Take the definitions out of schemas that routes wrote themselves, for the components."""
    if isinstance(node, dict):
        if "$defs" in node:
            yield node.pop("$defs")
        node = list(node.values())
    if isinstance(node, list):
        for each in node:
            yield from _inline_definitions(each)
