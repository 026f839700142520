"""`tandem sessions`: list the connections of clients, and end some."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import quote

import typer

from tandem.cli.context import TINKER_API, DataDir, JsonFlag, call, end_if_json, new_commands, say
from tandem.cli.tables import Column, byte_size, moment, say_rest, show_table
from tandem.errors import UserError

app = new_commands("Sessions, the connections of clients: list them, end some.")

_PAGE = 200
_END_SECONDS = 120.0
_URN = "tml:organization_user:"
_STATES: dict[str, str] = {"active": "active", "finished": "client_finished"}


@app.command("list")
def list_sessions(
    name: Annotated[str, typer.Option("--name", help="Only names with these words.")] = "",
    state: Annotated[
        Literal["active", "finished"] | None, typer.Option("--state", help="Only these.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="At most this many.")] = 20,
    every: Annotated[bool, typer.Option("--all", help="All of them.")] = False,
    data_dir: DataDir = None,
    as_json: JsonFlag = False,
) -> None:
    """List sessions, newest first, also ended ones.

    Example: tandem sessions list --state active"""
    body: dict[str, object] = {"owner": {"type": "accessible"}}
    body |= {"display_name": name} if name else {}
    body |= {"statuses": [{"type": _STATES[state]}]} if state else {}
    rows, more = _newest(data_dir, body, most=None if every else limit)
    end_if_json(as_json, {"sessions": rows, "more": more})
    show_table(
        [
            Column("id"),
            Column("state"),
            Column("name", wrap=16),
            Column("created", wrap=10),
            Column("owner"),
            Column("checkpoints", right=True),
            Column("storage", right=True),
            Column("project", wrap=12),
        ],
        [
            (
                row["session_id"],
                _state(row["status"]),
                row["display_name"],
                moment(row["created_at"]),
                row["owner"].removeprefix(_URN),
                row["checkpoints_count"],
                byte_size(row["checkpoint_storage_bytes"]),
                row["project_id"],
            )
            for row in rows
        ],
        empty="No sessions.",
    )
    if more:
        say_rest(len(rows), None, "sessions")


@app.command("end")
def end(
    sessions: Annotated[list[str], typer.Argument(help="Such as s-0123456789ab.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    data_dir: DataDir = None,
    as_json: JsonFlag = False,
) -> None:
    """End sessions, with their runs and samplers.

    Checkpoints stay. Unfinished operations fail.

    Example: tandem sessions end s-0123456789ab"""
    for session in sessions:
        if "/" in session:
            raise UserError(f"{session!r} is not a session's id; `tandem sessions list` shows ids")
    paths = [f"sessions/{quote(session, safe='')}/finish" for session in sessions]
    if not yes and not typer.confirm(f"End {', '.join(sessions)}?", err=True):
        raise typer.Abort
    body = {"reason": {"type": "interrupted"}, "detail": "ended with `tandem sessions end`"}
    for session, path in zip(sessions, paths, strict=True):
        call(data_dir, "POST", path, body=body, api=TINKER_API, timeout=_END_SECONDS)
        if not as_json:
            say(f"{session} has ended.")
    end_if_json(as_json, {"ended": sessions})


def _newest(
    data_dir: Path | None, body: dict[str, object], *, most: int | None
) -> tuple[list[dict[str, Any]], bool]:
    """Return the newest sessions, `None` for all of them, and whether there are more."""
    rows: list[dict[str, Any]] = []
    cursor: object = None
    while most is None or len(rows) < most:
        page = _PAGE if most is None else min(_PAGE, most - len(rows))
        asked = body | {"limit": page, "cursor": cursor}
        answer = call(data_dir, "POST", "sessions/search", body=asked, api=TINKER_API)
        rows += answer["sessions"]
        cursor = answer["next_cursor"]
        if cursor is None:
            break
    return rows, cursor is not None


def _state(status: dict[str, Any] | None) -> str:
    """Return `active`, `expired`, or `finished` with its reason in parentheses."""
    if status is None:
        return "expired"
    reason = status.get("reason")
    return f"finished ({reason['type']})" if reason else str(status["type"])
