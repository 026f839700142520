"""`tandem playground`: trials of blueprints for visitors, and the runner that trains them."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Annotated, Any
from urllib.parse import quote

import typer

from tandem.blueprints.runner import BlueprintRunner
from tandem.cli.context import (
    KEY_VARIABLE,
    DataDir,
    JsonFlag,
    call,
    chosen_gateway,
    end_if_json,
    new_commands,
    say,
    say_aside,
    set_values,
)
from tandem.cli.tables import Column, show_table

app = new_commands("The playground: visitors tune blueprints, one after the other.")

_COLUMNS = (
    Column("trial"),
    Column("owner"),
    Column("blueprint"),
    Column("state"),
    Column("place", right=True),
    Column("reason", wrap=24),
)


@app.command("show")
def show(data_dir: DataDir = None, as_json: JsonFlag = False) -> None:
    """Show the playground and the newest trials: yours, or everybody's for a maintainer.

    Example: tandem playground show --json"""
    about, trials = _playground(data_dir), call(data_dir, "GET", "playground/trials")["trials"]
    end_if_json(as_json, about | {"trials": trials})
    _say_state(about)
    rows = [
        (
            each["id"],
            each["owner"],
            each["blueprint"],
            each["state"],
            str(each["queue_position"] or ""),
            each["reason"],
        )
        for each in trials
    ]
    show_table(_COLUMNS, rows, empty="No trials.")


@app.command("open")
def open_playground(data_dir: DataDir = None, as_json: JsonFlag = False) -> None:
    """Let visitors start trials.

    Example: tandem playground open"""
    _switch(data_dir, as_json, open=True)


@app.command("close")
def close_playground(data_dir: DataDir = None, as_json: JsonFlag = False) -> None:
    """Start no further trial. Running trials go on.

    Example: tandem playground close"""
    _switch(data_dir, as_json, open=False)


@app.command("start")
def start(
    name: Annotated[str, typer.Argument(help="A blueprint.")],
    model: Annotated[str, typer.Option("--model", help="A base model.")],
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="A parameter; may be repeated."),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0)] = 0,
    data_dir: DataDir = None,
    as_json: JsonFlag = False,
) -> None:
    """Put a trial of a blueprint into the queue.

    Example: tandem playground start sft-chat --model my/chat --set steps=20"""
    body = {"blueprint": name, "model": model, "values": set_values(settings or []), "seed": seed}
    trial = call(data_dir, "POST", "playground/trials", body=body)
    end_if_json(as_json, trial)
    say(f"{trial['id']} is number {trial['queue_position']} in the queue.")


@app.command("end")
def end(
    trial_id: Annotated[str, typer.Argument(help="The trial, as `show` names it.")],
    data_dir: DataDir = None,
    as_json: JsonFlag = False,
) -> None:
    """End a trial, with its runs and their checkpoints.

    Example: tandem playground end trial-5a1c0e7b9d3f"""
    trial = call(data_dir, "POST", f"playground/trials/{quote(trial_id, safe='')}/end")
    end_if_json(as_json, trial)
    say(f"{trial['id']} is {trial['state']}: {trial['reason']}")


@app.command("runner")
def runner(
    slots: Annotated[
        int | None, typer.Option("--slots", min=1, max=64, help="Programs at once; default: all.")
    ] = None,
    key_file: Annotated[
        Path | None, typer.Option("--key-file", help="A file with the key, such as of a Secret.")
    ] = None,
    data_dir: DataDir = None,
) -> None:
    """Train the playground's trials, until Ctrl-C. It needs an administrator's key.

    `tandem up` has a runner of its own.

    Example: tandem playground runner --slots 2"""
    if key_file is not None:
        os.environ[KEY_VARIABLE] = key_file.read_text(encoding="utf-8").strip()
    gateway, stop = chosen_gateway(data_dir), threading.Event()
    slots = slots or max(1, int(_playground(data_dir)["runs"]))

    def end_soon(_signal: int, _frame: FrameType | None) -> None:
        stop.set()

    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, end_soon)
    say_aside(f"Training the trials of {gateway.url}, {slots} at once.")
    BlueprintRunner(url=gateway.url, key=gateway.api_key, slots=slots, say=say_aside).run_trials(
        stop
    )


def _playground(data_dir: Any) -> dict[str, Any]:
    return dict(call(data_dir, "GET", "playground"))


def _switch(data_dir: Any, as_json: bool, *, open: bool) -> None:
    about = call(data_dir, "PUT", "playground", body={"open": open})
    end_if_json(as_json, about)
    _say_state(about)


def _say_state(about: dict[str, Any]) -> None:
    if not about["runs"]:
        say("This gateway has no playground. TANDEM_PLAYGROUND_RUNS opens one.")
        return
    say(
        f"The playground is {'open' if about['open'] else 'closed'}: {about['running']} of "
        f"{about['runs']} train, {about['waiting']} wait. A trial ends after "
        f"{about['minutes']:g} minutes or {about['tokens']} tokens."
    )
