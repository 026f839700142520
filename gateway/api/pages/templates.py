"""Templates and static files of the page.

A static file's name holds a hash of its content, so browsers keep it for good. Templates name a
file by `static("page.css")`."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import jinja2

from gateway.api.pages.texts import ago, clock, compact, figure, iso, shade, visible
from tandem import __version__
from tandem.log_lines import event_of

_FOLDER = Path(__file__).parent

HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src 'self' data:; form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
}


@cache
def static_files() -> Mapping[str, Path]:
    """Return the static files by their name in an address, such as `page.1f2e3d4c5b6a.css`."""
    found = dict[str, Path]()
    for file in sorted((_FOLDER / "static").rglob("*")):
        if file.suffix in (".css", ".js", ".svg"):
            digest = hashlib.sha256(file.read_bytes()).hexdigest()[:12]
            found[f"{file.stem}.{digest}{file.suffix}"] = file
    return found


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
    paths = {file.name: f"/static/{name}" for name, file in static_files().items()}
    found.filters.update(ago=ago, clock=clock, compact=compact, iso=iso, number=figure, shade=shade)
    found.filters.update(event=lambda text: event_of(text)[0])
    found.globals.update(static=paths.__getitem__, version=__version__)
    return found


def fragment(template: str, **data: object) -> str:
    """Return a page or a part of one."""
    return environment().get_template(template).render(data)
