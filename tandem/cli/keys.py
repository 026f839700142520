"""`tandem keys`: create, list and revoke the keys of the gateway."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from tandem.cli.context import (
    DataDir,
    JsonFlag,
    call,
    end_if_json,
    new_commands,
    remote_url,
    resolve_data_dir,
    run_offline,
    say,
)
from tandem.cli.tables import Column, moment, show_table
from tandem.errors import UserError
from tandem.stack import read_endpoint

app = new_commands("API keys: create, list and revoke.")

OfflineFlag = Annotated[
    bool,
    typer.Option(
        "--offline",
        help="Change the database of --data-dir, with no gateway. Default if none runs.",
    ),
]

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}
_COLUMNS = {
    "id": Column("id"),
    "owner": Column("owner"),
    "role": Column("role"),
    "state": Column("state"),
    "name": Column("name", wrap=12),
    "expires_at": Column("expires", wrap=10),
    "last_used_at": Column("last used", wrap=10),
    "created_at": Column("created", wrap=10),
}
"""The fields of a key that are shown."""


@app.command("create")
def create(
    owner: Annotated[str, typer.Option(help="Who owns it, such as a person or a team.")],
    role: Annotated[
        Literal["admin", "maintainer", "member", "ci", "reader", "metrics"],
        typer.Option(
            help="admin: everything; maintainer: also drains groups, and stops the runs of all; "
            "member: everything of its owner; ci: runs of blueprints; reader: read only; "
            "metrics: where the metrics are, and them, for Prometheus."
        ),
    ] = "member",
    name: Annotated[str, typer.Option(help="What it is for.")] = "",
    expires: Annotated[
        str, typer.Option(help="Lifetime, such as 12h, 30d or 8w. Default: unlimited.")
    ] = "",
    offline: OfflineFlag = False,
    data_dir: DataDir = None,
    as_json: JsonFlag = False,
) -> None:
    """Create a key and show it once.

    Example: tandem keys create --owner alice --expires 30d"""
    body: dict[str, object] = {"owner": owner, "role": role, "name": name}
    if expires:
        body["expires_in"] = parse_duration(expires)
    answer = _ask(data_dir, "create", body=body, offline=offline)
    end_if_json(as_json, answer)
    say(f"Key {answer['id']} of {owner}, role {role}. It is shown only this once:\n")
    say(f"  export TINKER_API_KEY={answer['key']}\n")
    say(f"`tandem keys revoke {answer['id']}` revokes it.")


@app.command("list")
def list_keys(
    offline: OfflineFlag = False, data_dir: DataDir = None, as_json: JsonFlag = False
) -> None:
    """List all keys, including expired and revoked ones.

    The keys themselves are not shown.

    Example: tandem keys list --json"""
    answer = _ask(data_dir, "list", offline=offline)
    end_if_json(as_json, answer)
    show_table(
        list(_COLUMNS.values()),
        [
            [moment(key[name]) if name.endswith("_at") else key[name] for name in _COLUMNS]
            for key in answer["keys"]
        ],
    )


@app.command("revoke")
def revoke(
    key_id: Annotated[str, typer.Argument(help="The id of the key, as `list` shows it.")],
    offline: OfflineFlag = False,
    data_dir: DataDir = None,
    as_json: JsonFlag = False,
) -> None:
    """Revoke a key and all its tokens at once.

    Example: tandem keys revoke k-0123456789ab"""
    answer = _ask(data_dir, "revoke", key_id=key_id, offline=offline)
    end_if_json(as_json, answer)
    say(f"{answer['id']} of {answer['owner']} is revoked.")


def parse_duration(text: str) -> int:
    """Return seconds: 2592000 for `30d`. Raises `UserError`."""
    found = re.fullmatch(r"(\d{1,6})([smhdw])", text)
    if found is None or int(found[1]) == 0:
        raise UserError(f"{text[:40]!r} is not a duration such as 12h, 30d or 8w")
    return int(found[1]) * _UNITS[found[2]]


def _ask(
    data_dir: Path | None,
    action: str,
    *,
    body: Mapping[str, object] | None = None,
    key_id: str = "",
    offline: bool,
) -> dict[str, Any]:
    """Ask the chosen gateway. `offline`, or if none runs here: change the database."""
    if offline or (not remote_url(data_dir) and read_endpoint(resolve_data_dir(data_dir)) is None):
        directory = resolve_data_dir(data_dir)
        request = {"action": action, "create": body, "key_id": key_id}
        return run_offline("gateway.admin.offline_keys", directory, request)
    if not re.fullmatch(r"[A-Za-z0-9-]{0,64}", key_id):
        raise UserError(f"{key_id[:80]!r} is not the id of a key; `tandem keys list` shows them")
    method, path = {
        "create": ("POST", "keys"),
        "list": ("GET", "keys"),
        "revoke": ("DELETE", f"keys/{key_id}"),
    }[action]
    answer: dict[str, Any] = call(data_dir, method, path, body=body)
    return answer
