"""`tandem status`, `ping` and `version`: commands that only show."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

from tandem import __version__
from tandem.cli.context import (
    OWN_API,
    DataDir,
    JsonFlag,
    call,
    chosen_gateway,
    end_if_json,
    explained,
    fail,
    read_answer,
    say,
    say_aside,
)
from tandem.cli.tables import Column, id_column, show_table

_TABLES: dict[str, tuple[Column, ...]] = {
    "sessions": (
        Column("id"),
        Column("owner"),
        Column("idle_seconds", right=True),
        Column("display_name", wrap=20),
    ),
    "runs": (
        Column("id"),
        Column("state"),
        Column("step", right=True),
        Column("queued", right=True),
        Column("operation", wrap=28),
        Column("reason", wrap=24),
        Column("base_model"),
        Column("weight_version"),
    ),
    "samplers": (
        Column("worker"),
        Column("replica", right=True),
        Column("state"),
        Column("waiting", right=True),
        Column("under_way", right=True),
        Column("reason", wrap=24),
        Column("base_model"),
        Column("weight_version"),
    ),
    "workers": (
        Column("id"),
        Column("kind"),
        Column("state"),
        Column("version"),
        Column("pid", right=True),
        Column("age_seconds", right=True),
    ),
}
"""Columns by field of the status."""
_PINGS = 5


def status(data_dir: DataDir = None, as_json: JsonFlag = False) -> None:
    """Show sessions, training runs, samplers and workers, with their queues.

    Example: tandem status --json"""
    answer = call(data_dir, "GET", "status")
    end_if_json(as_json, answer)
    for sentence in answer["warnings"]:
        fail(sentence, "warning")
    for number, (name, columns) in enumerate(_TABLES.items()):
        if number:
            say("")
        rows = [_as_shown(row) for row in answer.get(name, [])]
        if name == "runs":
            columns = (id_column("id", [row["id"] for row in answer[name]]), *columns[1:])
        cells = [[row.get(column.heading) for column in columns] for row in rows]
        show_table(columns, cells, title=f"{name}:", empty=f"No {name}.")


def _as_shown(row: dict[str, Any]) -> dict[str, Any]:
    shown = dict(row)
    if isinstance(operation := row.get("operation"), dict):
        shown["operation"] = operation["says"]
    if row.get("name"):
        shown["id"] = f"{row['id']} {row['name']}"
    return shown


def ping(data_dir: DataDir = None, as_json: JsonFlag = False) -> None:
    """Show whether the gateway answers, how fast, and to whom.

    Example: tandem ping --url https://tandem.example.org"""
    target = chosen_gateway(data_dir)
    path, seconds = f"{OWN_API}/version", []
    with explained(target), target.client() as client:
        for _ in range(1 + _PINGS):  # the first one connects
            began = time.perf_counter()
            answer = read_answer(target, client.get(path))
            seconds.append(time.perf_counter() - began)
    about = {
        "url": target.url,
        "tls": target.url.startswith("https:"),
        **answer,
        "seconds": median(seconds[1:]),
        "connect_seconds": seconds[0],
    }
    end_if_json(as_json, about)
    tls = "over TLS" if about["tls"] else "without TLS"
    say(
        f"Tandem {about['version']} at {target.url} answers {tls} in "
        f"{1000 * about['seconds']:.1f} ms ({1000 * about['connect_seconds']:.1f} ms with a new "
        "connection)."
    )
    say(f"The key is of {about['owner']}, with the role {about['role']}.")
    if about["version"] != __version__:
        say_aside(f"This command is of Tandem {__version__}.")


def version(as_json: JsonFlag = False) -> None:
    """Print the versions of Tandem and its libraries.

    Example: tandem version --json"""
    from tandem.demo.run import versions

    found = versions()
    end_if_json(as_json, found)
    for name, number in found.items():
        say(f"{name} {number}")
