"""`tandem groups`: the device groups. `tandem top`: the workers on their devices."""

from __future__ import annotations

import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Annotated, NoReturn
from urllib.parse import quote

import typer
from rich.live import Live
from rich.text import Text

from tandem.cli.context import DataDir, JsonFlag, Row, call, end_if_json, new_commands, out, say
from tandem.cli.tables import Column, byte_size, duration, id_column, show_table

app = new_commands("Device groups: list them, drain one.")

_GROUPS = (
    Column("group"),
    Column("state"),
    Column("awake", right=True),
    Column("waiting", right=True),
    Column("placed", right=True),
    Column("switches", right=True),
    Column("switch", right=True),
    Column("resident", right=True),
    Column("asleep", right=True),
    Column("spilled", right=True),
    Column("roles"),
    Column("policy"),
    Column("devices", wrap=24),
)
_WORKERS = (
    Column("group"),
    Column("state"),
    Column("turn", right=True),
    Column("for", right=True),
    Column("expected", right=True),
    Column("worker"),
    Column("owner"),
    Column("kind"),
    Column("used", right=True),
    Column("reason", wrap=24),
)
_ANOTHERS = "(another owner's)"
_HOLDING = (
    "starting",
    "awake",
    "giving_way",
    "falling_asleep",
    "waking",
    "stopping",
    "lost",
)
"""States in which a worker's state may be on its devices. They count as awake."""


@app.command("list")
def list_groups(data_dir: DataDir = None, as_json: JsonFlag = False) -> None:
    """List device groups with their devices, workers and switches.

    Example: tandem groups list --json"""
    answer = call(data_dir, "GET", "groups")
    end_if_json(as_json, answer)
    _show_groups(answer)


@app.command("drain")
def drain(
    name: Annotated[str, typer.Argument(help="The group, as `list` shows it.")],
    undo: Annotated[bool, typer.Option("--undo", help="Let it take workers again.")] = False,
    data_dir: DataDir = None,
    as_json: JsonFlag = False,
) -> None:
    """Stop placing workers on a group.

    Idle workers sleep or end. Running workers continue.

    Example: tandem groups drain gpu-0"""
    method = "DELETE" if undo else "POST"
    group = call(data_dir, method, f"groups/{quote(name, safe='')}/drain")
    end_if_json(as_json, group)
    if undo:
        say(f"{group['name']} takes workers again.")
    else:
        say(
            f"{group['name']} takes no more workers; {group['placed']} are there. "
            f"`tandem groups drain {group['name']} --undo` undoes it."
        )


def top(
    once: Annotated[bool, typer.Option("--once", help="Print it once.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 2.0,
    data_dir: DataDir = None,
    as_json: JsonFlag = False,
) -> None:
    """Show every worker's turn, wait and reason, and each owner's device seconds.

    The display repeats until Ctrl-C. Use --once to print it once.

    Example: tandem top --interval 5"""
    if once or as_json:
        _look(data_dir, as_json=as_json)
        return
    with suppress(KeyboardInterrupt):
        if out.is_terminal:
            _look_live(data_dir, interval)
        while True:
            _look(data_dir)
            say("")
            time.sleep(interval)


def _look_live(data_dir: Path | None, interval: float) -> NoReturn:
    with Live(console=out, screen=True, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            with out.capture() as shown:
                _look(data_dir)
            live.update(Text.from_ansi(shown.get()), refresh=True)
            time.sleep(interval)


def _look(data_dir: Path | None, *, as_json: bool = False) -> None:
    answer = call(data_dir, "GET", "groups")
    end_if_json(as_json, answer)
    say(time.strftime("%H:%M:%S"))
    _show_groups(answer)
    say("")
    _show_workers(answer)
    if queue := answer["queue"]:
        say("")
        show_table(
            [Column("turn", right=True), Column("owner"), Column("waits"), Column("reason", 32)],
            [[row["position"], row["owner"], row["worker"], row["reason"]] for row in queue],
            title="waiting for a place:",
        )
    if owners := _device_seconds(answer["groups"]):
        say("")
        show_table(
            [Column("owner"), Column("device seconds", right=True)],
            [[owner, f"{used:.1f}"] for owner, used in owners],
            title="owners, with all workers of now:",
        )


def _device_seconds(groups: list[Row]) -> list[tuple[str, float]]:
    """Return the device seconds of each owner's present workers: their time times the devices."""
    found: defaultdict[str, float] = defaultdict(float)
    for group in groups:
        devices = len(group["devices"]) or 1
        for worker in group["workers"]:
            if owner := worker["owner"]:
                found[owner] += worker["device_seconds"] * devices
    return sorted(found.items(), key=lambda item: -item[1])


def _show_groups(answer: Row) -> None:
    show_table(_GROUPS, [_group_row(group) for group in answer["groups"]])
    if memory := answer["memory"]:
        used, budget = (byte_size(memory[name]) for name in ("used_bytes", "budget_bytes"))
        of = f" of {budget}" if memory["budget_bytes"] else ""
        say(f"host memory: workers have {used}{of}")


def _group_row(group: Row) -> list[object]:
    states = [worker["state"] for worker in group["workers"]]
    return [
        group["name"],
        "drained" if group["drained"] else "open",
        f"{sum(state in _HOLDING for state in states)}/{group['awake'] or 'all'}",
        states.count("waiting"),
        f"{group['placed']}/{group['most_workers'] or 'any'}",
        group["switches"],
        duration(group["switch_seconds"]),
        byte_size(group["resident_bytes"]),
        byte_size(group["sleeping_bytes"]),
        byte_size(group["spilled_bytes"]),
        ", ".join(group["roles"]),
        group["policy"] if group["awake"] else "",
        ", ".join(group["devices"]) or "the whole machine",
    ]


def _show_workers(answer: Row) -> None:
    """Print lease holders first, then waiting workers in turn."""
    rows = [
        [
            group["name"],
            str(worker["state"]).replace("_", " "),
            worker["position"] or "",
            duration(worker["seconds"]),
            duration(worker["expected_seconds"]),
            f"{worker['worker'] or _ANOTHERS} {worker['name']}".strip(),
            worker["owner"],
            worker["kind"],
            duration(worker["device_seconds"]),
            worker["reason"],
        ]
        for group in answer["groups"]
        for worker in group["workers"]
    ]
    keys = [
        worker["worker"] or _ANOTHERS for group in answer["groups"] for worker in group["workers"]
    ]
    columns = [id_column("worker", keys) if each.heading == "worker" else each for each in _WORKERS]
    show_table(columns, rows, empty="No workers.")
