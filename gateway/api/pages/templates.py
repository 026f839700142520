"""Templates and static files of the page.

A static file's name holds a hash of its content, so browsers keep it for good. Templates name a
file by `static("page.css")`."""

from __future__ import annotations

import hashlib
import mimetypes
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath

import jinja2
from starlette.responses import HTMLResponse, Response

from gateway.api.pages.texts import ago, clock, compact, figure, iso, visible
from tandem import __version__

_FOLDER = Path(__file__).parent

HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src 'self' data:; form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
}


@dataclass(frozen=True)
class StaticFile:
    path: str
    media_type: str
    content: bytes


@cache
def static_files() -> Mapping[str, StaticFile]:
    """Return the static files by the last part of their path, such as `page.1f2e3d4c.css`."""
    return {PurePosixPath(each.path).name: each for _, each in _read_files()}


def _read_files() -> Iterator[tuple[str, StaticFile]]:
    for file in sorted((_FOLDER / "static").rglob("*")):
        if file.suffix in (".css", ".js", ".svg"):
            content = file.read_bytes()
            digest = hashlib.sha256(content).hexdigest()[:12]
            media_type = mimetypes.types_map[file.suffix]
            path = f"/static/{file.stem}.{digest}{file.suffix}"
            yield file.name, StaticFile(path, media_type, content)


@cache
def environment() -> jinja2.Environment:
    """Return the environment of all templates. Values are escaped, and a missing one raises."""
    found = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=lambda value: visible(value) if type(value) is str else value,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    paths = {name: file.path for name, file in _read_files()}
    found.filters.update(
        ago=ago, clock=clock, compact=compact, iso=iso, number=figure, with_item=_with_item
    )
    found.globals.update(static=paths.__getitem__, version=__version__)
    return found


def _with_item(items: Mapping[str, object], name: str, value: object) -> dict[str, object]:
    return {**items, name: value}


def fragment(template: str, **data: object) -> str:
    """Return a part of a page."""
    return environment().get_template(template).render(data)


def render(template: str, *, status: int = 200, **data: object) -> Response:
    """Return a page, which no cache keeps, because the next person may not see it."""
    text = fragment(template, **data)
    return HTMLResponse(text, status, headers={**HEADERS, "Cache-Control": "no-store"})
