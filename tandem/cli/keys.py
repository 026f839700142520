"""`tandem keys`: who may use the gateway, and as what."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, cast

import orjson
import typer
from rich.markup import escape
from rich.table import Table

from tandem.cli.context import DataDir, JsonFlag, call, out, print_json, resolve_data_dir
from tandem.errors import ServerError, UserError
from tandem.stack import read_endpoint

app = typer.Typer(help="API keys: make, list and revoke.", no_args_is_help=True)

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}
_OFFLINE_SECONDS = 60
_COLUMNS = {
    "id": "id",
    "owner": "owner",
    "role": "role",
    "name": "name",
    "state": "state",
    "created_at": "created",
    "expires_at": "expires",
    "last_used_at": "last used",
}
"""What is shown of a key, and its heading."""

Rows = list[dict[str, object]]


class RoleName(StrEnum):
    admin = "admin"
    member = "member"
    reader = "reader"


@app.command("create")
def create(
    owner: Annotated[str, typer.Option(help="Whose key it is, such as a name or a team.")],
    role: Annotated[
        RoleName,
        typer.Option(
            help="admin: everything; member: everything of its owner; reader: only to look."
        ),
    ] = RoleName.member,
    name: Annotated[str, typer.Option(help="What it is for, to tell it from others.")] = "",
    expires: Annotated[
        str, typer.Option(help="How long it is good, such as 12h, 30d or 8w; else without end.")
    ] = "",
    data_dir: DataDir = None,
    as_json: JsonFlag = False,
) -> None:
    """Makes a key and shows it, this once."""
    body: dict[str, object] = {"owner": owner, "role": role.value, "name": name}
    if expires:
        body["expires_in"] = parse_duration(expires)
    answer = _ask(data_dir, "create", body=body)
    if as_json:
        print_json(answer)
        return
    out.print(f"Key {answer['id']} of {escape(owner)}, role {role.value}. It is shown this once:\n")
    out.print(f"  export TINKER_API_KEY={answer['key']}\n", soft_wrap=True, markup=False)
    out.print(f"`tandem keys revoke {answer['id']}` ends it.")


@app.command("list")
def list_keys(data_dir: DataDir = None, as_json: JsonFlag = False) -> None:
    """Lists the keys, also those that have ended; none is shown itself."""
    answer = _ask(data_dir, "list")
    if as_json:
        print_json(answer)
        return
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column, heading in _COLUMNS.items():
        width = 10 if column.endswith("_at") else None  # a date; its time may go below it
        table.add_column(heading, no_wrap=column == "id", overflow="fold", min_width=width)
    for key in cast(Rows, answer["keys"]):
        table.add_row(*(escape(_cell(key[column])) for column in _COLUMNS))
    out.print(table)


@app.command("revoke")
def revoke(
    key_id: Annotated[str, typer.Argument(help="The id of the key, as `list` shows it.")],
    data_dir: DataDir = None,
    as_json: JsonFlag = False,
) -> None:
    """Ends a key, at once and for good, with all tokens that were exchanged for it."""
    answer = _ask(data_dir, "revoke", key_id=key_id)
    if as_json:
        print_json(answer)
    else:
        out.print(f"{answer['id']} of {escape(str(answer['owner']))} is revoked.")


def parse_duration(text: str) -> int:
    """Seconds. Literal example: `30d` gives 2592000. Raises `UserError`."""
    found = re.fullmatch(r"(\d{1,6})([smhdw])", text)
    if found is None or int(found[1]) == 0:
        raise UserError(f"{text[:40]!r} is no duration; it looks like 12h, 30d or 8w")
    return int(found[1]) * _UNITS[found[2]]


def _ask(
    data_dir: Path | None,
    action: str,
    *,
    body: Mapping[str, object] | None = None,
    key_id: str = "",
) -> dict[str, object]:
    """Asks the gateway of this data directory, or does it there where none runs."""
    directory = resolve_data_dir(data_dir)
    if read_endpoint(directory) is None:
        return _offline(directory, {"action": action, "create": body, "key_id": key_id})
    if not re.fullmatch(r"[A-Za-z0-9-]{0,64}", key_id):
        raise UserError(f"{key_id[:80]!r} is not the id of a key; `tandem keys list` shows them")
    method, path = {
        "create": ("POST", "keys"),
        "list": ("GET", "keys"),
        "revoke": ("DELETE", f"keys/{key_id}"),
    }[action]
    return cast(dict[str, object], call(directory, method, path, body=body))


def _offline(directory: Path, request: Mapping[str, object]) -> dict[str, object]:
    """In a process of its own: the command itself has no part of the gateway."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "gateway.offline_keys"],
            input=orjson.dumps(request),
            capture_output=True,
            env={**os.environ, "TANDEM_DATA_DIR": str(directory)},
            timeout=_OFFLINE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ServerError(
            f"the database of {directory} did not answer within {_OFFLINE_SECONDS} s"
        ) from error
    try:
        answer = cast(dict[str, object], orjson.loads(done.stdout))
    except orjson.JSONDecodeError as error:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise ServerError(f"the keys could not be reached: {''.join(last)}") from error
    if "error" in answer:
        raise UserError(str(answer["error"]))
    return answer


def _cell(value: object) -> str:
    """Times to the minute, UTC."""
    text = "" if value is None else str(value)
    return f"{text[:10]} {text[11:16]}" if re.match(r"\d{4}-\d\d-\d\dT", text) else text
