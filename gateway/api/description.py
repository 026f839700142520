"""The OpenAPI document, and FastAPI's page of it without external requests."""

from __future__ import annotations

import base64
import hashlib
import re
import warnings
from pathlib import Path
from typing import Any

import fastapi_offline
from fastapi import FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, Response

from gateway.api.errors import json_response
from gateway.api.fields import PathText
from gateway.api.pages.routing import PageOperation
from gateway.api.routing import BOUNDS, RAW, Router, file_response
from tandem import __version__

_ABOUT = (
    "The routes of a Tandem gateway: those of the `tinker` SDK under /api/v1, those for OpenAI's "
    "clients under /v1, Tandem's own under /api/tandem/v1. A request that is refused is answered "
    "with `{error, type, category}`; an accepted operation that fails is answered with 200 and "
    "the same fields."
)

_STATIC = Path(fastapi_offline.__file__).parent / "static"
_FILES = frozenset({"swagger-ui-bundle.js", "swagger-ui.css", "favicon.png"})

router = Router(tag="Tandem", route_class=PageOperation)


@router.operation(
    "GET",
    "/openapi.json",
    role="reader",
    responses={200: file_response("application/json", "An OpenAPI 3.1 document")},
)
async def openapi(request: Request) -> Response:
    """Return this description."""
    return json_response(request.app.openapi())


@router.operation(
    "GET", "/docs", role="reader", responses={200: file_response("text/html", "A page")}
)
async def docs(request: Request) -> Response:
    """Return a page that shows this description and sends requests."""
    root = request.scope.get("root_path", "")
    page = get_swagger_ui_html(
        openapi_url=f"{root}/openapi.json",
        title="Tandem",
        swagger_js_url=f"{root}/docs/swagger-ui-bundle.js",
        swagger_css_url=f"{root}/docs/swagger-ui.css",
        swagger_favicon_url=f"{root}/docs/favicon.png",
    )
    return HTMLResponse(page.body, headers={"Content-Security-Policy": _policy(bytes(page.body))})


@router.operation(
    "GET",
    "/docs/{file}",
    role="reader",
    responses={200: file_response("*/*", "A script, a style sheet or an image")},
)
async def docs_file(file: PathText) -> Response:
    """Return a file of the page `/docs`."""
    if file not in _FILES:
        raise HTTPException(404)
    return FileResponse(_STATIC / file)


def _policy(page: bytes) -> str:
    """Return a policy for this server's files and the page's own scripts, by their hashes."""
    scripts = re.findall(rb"<script>(.*?)</script>", page, re.S)
    hashes = [base64.b64encode(hashlib.sha256(script).digest()).decode() for script in scripts]
    own = " ".join(["'self'", *(f"'sha256-{each}'" for each in hashes)])
    return (
        f"default-src 'none'; script-src {own}; style-src 'self'; img-src 'self' data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def document(app: FastAPI) -> dict[str, Any]:
    """Return FastAPI's document, built once and corrected: wrong fields give 400 (see `errors.py`),
    and HEAD is GET without a body."""
    if app.openapi_schema is None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Duplicate Operation ID")  # of GET and its HEAD
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
                operation.pop(RAW, None)
                operation.pop(BOUNDS, None)
                for content in operation.get("requestBody", {}).get("content", {}).values():
                    schemas.update(content["schema"].pop("$defs", {}))
        for name in ("HTTPValidationError", "ValidationError"):
            schemas.pop(name, None)
        found["components"]["schemas"] = dict(sorted(schemas.items()))
        found["components"]["securitySchemes"] = {
            "ApiKey": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
            "Bearer": {"type": "http", "scheme": "bearer"},
        }
        app.openapi_schema = found
    return app.openapi_schema
