"""Templates and static files of the page.

A static file's name holds a hash of its content, so browsers keep it for good. Templates name a
file by `static("page.css")`."""

from __future__ import annotations

import hashlib
import mimetypes
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath

import jinja2
import orjson
from starlette.responses import HTMLResponse, Response

from gateway.api.pages.charts import figure
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

_INVISIBLE = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]"
)


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
        finalize=_visible,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    paths = {name: file.path for name, file in _read_files()}
    found.filters.update(
        ago=ago, clock=clock, compact=compact, iso=iso, number=figure, with_item=_with_item
    )
    found.globals.update(static=paths.__getitem__, version=__version__)
    return found


def clock(at: float, dated: bool = False) -> str:
    """Return a time of day in UTC, with the day if `dated`. `at` is in seconds since 1970."""
    return time.strftime("%d %b %H:%M" if dated else "%H:%M", time.gmtime(at))


def iso(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at))


def ago(at: float) -> str:
    """Return how long ago a time was, such as `5 min ago`, and the day after a week."""
    seconds = max(0.0, time.time() - at)
    for unit, name in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= unit:
            within = seconds < 7 * 86_400
            return f"{seconds // unit:.0f} {name} ago" if within else clock(at, dated=True)
    return "just now"


def compact(value: object) -> str:
    """Return a value of a configuration as JSON, a number with all its digits."""
    return orjson.dumps(value, default=str).decode()


def _with_item(items: Mapping[str, object], name: str, value: object) -> dict[str, object]:
    return {**items, name: value}


def _visible(value: object) -> object:
    """Replace control characters, and those that turn the direction of the text around them."""
    return _INVISIBLE.sub("\ufffd", value) if type(value) is str else value


def fragment(template: str, **data: object) -> str:
    """Return a part of a page."""
    return environment().get_template(template).render(data)


def render(template: str, *, status: int = 200, **data: object) -> Response:
    """Return a page, which no cache keeps, because the next person may not see it."""
    text = fragment(template, **data)
    return HTMLResponse(text, status, headers={**HEADERS, "Cache-Control": "no-store"})
