"""`tandem owners`: the limits and budgets of owners."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any
from urllib.parse import quote

import typer

from tandem.cli.context import DataDir, JsonFlag, call, end_if_json, new_commands
from tandem.cli.tables import Column, byte_size, count, show_table
from tandem.errors import UserError

app = new_commands("Owners: list them, set their limits and budgets.")

_NAME = typer.Argument(help="The owner of keys, such as a person or a team.")
_LIMITS = ("sessions", "runs", "samplers", "checkpoint_bytes")
_BUDGETS = ("device_hours", "tokens")


@app.command("list")
def list_owners(data_dir: DataDir = None, as_json: JsonFlag = False) -> None:
    """List owners with their limits and budgets, as USED/LIMIT. Members see themselves.

    A star marks a limit that is not the settings'.

    Example: tandem owners list --json"""
    answer = call(data_dir, "GET", "owners")
    end_if_json(as_json, answer)
    _show(answer["owners"])


@app.command("show")
def show(owner: Annotated[str, _NAME], data_dir: DataDir = None, as_json: JsonFlag = False) -> None:
    """Show an owner's limits and budget, as USED/LIMIT.

    Example: tandem owners show ann"""
    answer = call(data_dir, "GET", f"owners/{quote(owner, safe='')}")
    end_if_json(as_json, answer)
    _show([answer])


@app.command("set")
def change(
    owner: Annotated[str, _NAME],
    sessions: Annotated[int | None, typer.Option(min=0, help="Active sessions.")] = None,
    runs: Annotated[int | None, typer.Option(min=0, help="Runs that have not ended.")] = None,
    samplers: Annotated[int | None, typer.Option(min=0, help="Engines.")] = None,
    checkpoint_bytes: Annotated[
        str, typer.Option(metavar="BYTES", help="Bytes of checkpoints, such as 1e12.")
    ] = "",
    device_hours: Annotated[
        float | None, typer.Option(min=0, help="Budget of device-hours.")
    ] = None,
    tokens: Annotated[str, typer.Option(help="Budget of tokens, such as 1e9.")] = "",
    anew: Annotated[bool, typer.Option("--anew", help="Count the budget from now on.")] = False,
    clear: Annotated[
        bool, typer.Option("--clear", help="Remove all limits and budgets that are not named.")
    ] = False,
    data_dir: DataDir = None,
    as_json: JsonFlag = False,
) -> None:
    """Set an owner's limits and budget. Those that are not named stay.

    Example: tandem owners set ann --runs 4 --device-hours 100 --tokens 1e9"""
    given: dict[str, object] = {
        "sessions": sessions,
        "runs": runs,
        "samplers": samplers,
        "checkpoint_bytes": _whole(checkpoint_bytes, "--checkpoint-bytes"),
        "device_hours": device_hours,
        "tokens": _whole(tokens, "--tokens"),
    }
    body = {name: value for name, value in given.items() if value is not None or clear}
    if not body and not anew:
        raise UserError("name a limit or a budget, such as --runs 4, or --anew or --clear")
    answer = call(data_dir, "PATCH", f"owners/{quote(owner, safe='')}", body=body | {"anew": anew})
    end_if_json(as_json, answer)
    _show([answer])


def _whole(text: str, option: str) -> int | None:
    """Parse a number such as 1e9. Raises `UserError`."""
    if not text:
        return None
    try:
        number = float(text)
        if number == int(number) >= 0:
            return int(number)
    except (ValueError, OverflowError):
        pass
    raise UserError(f"{option} is {text[:40]!r}; it is a whole number such as 1000000 or 1e9")


def _show(owners: Sequence[dict[str, Any]]) -> None:
    columns = (*_LIMITS, *_BUDGETS)
    show_table(
        [Column("owner"), *(Column(name, right=True) for name in columns), Column("state")],
        [_row(owner) for owner in owners],
    )


def _row(owner: dict[str, Any]) -> list[str]:
    budget = owner["budget"] or {}
    cells = [owner["owner"]]
    for name in _LIMITS:
        shown = byte_size if name == "checkpoint_bytes" else count
        star = "*" if name in owner["own"] else ""
        cells.append(f"{shown(owner['used'][name])}/{shown(owner['limits'][name])}{star}")
    for name in _BUDGETS:
        if budget.get(name) is None:
            cells.append("-")
        elif name == "tokens":
            cells.append(f"{count(budget['used_tokens'])}/{count(budget['tokens'])}")
        else:
            cells.append(f"{budget['used_device_hours']:.2f}/{budget['device_hours']:g}")
    return [*cells, "budget_exhausted" if budget.get("exhausted") else ""]
