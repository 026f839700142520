"""Templates and static files of the page.

A static file's name holds a hash of its content, so browsers keep it for good. Templates name a
file by `static("page.css")`."""

from __future__ import annotations

import hashlib
import mimetypes
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath

import jinja2
from starlette.responses import HTMLResponse, Response

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
        trim_blocks=True,
        lstrip_blocks=True,
    )
    paths = {name: file.path for name, file in _read_files()}
    found.filters["clock"] = clock
    found.globals.update(static=paths.__getitem__, version=__version__)
    return found


def clock(at: float, dated: bool = False) -> str:
    """Return a time of day in UTC, with the day if `dated`. `at` is in seconds since 1970."""
    return time.strftime("%d %b %H:%M" if dated else "%H:%M", time.gmtime(at))


def render(template: str, *, status: int = 200, **data: object) -> Response:
    """Return a page, which no cache keeps, because the next person may not see it."""
    text = environment().get_template(template).render(data)
    return HTMLResponse(text, status, headers={**HEADERS, "Cache-Control": "no-store"})
