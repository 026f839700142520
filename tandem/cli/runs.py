"""`tandem runs`: list, stop and name runs.

`run_show` shows one, `run_compare` several, `run_export` writes a record."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer

from tandem.cli import run_compare, run_export, run_names, run_show
from tandem.cli.context import DataDir, JsonFlag, call, end_if_json, new_commands, say, say_aside
from tandem.cli.run_names import RunArgument, run_in_url
from tandem.cli.run_values import done, main_value, step_of
from tandem.cli.tables import Column, moment, say_rest, show_table
from tandem.errors import UserError

app = new_commands("Training runs: list them, show their steps, compare, name and stop them.")

_STOP_SECONDS, _POLL_SECONDS = 60.0, 0.5


@app.command("list")
def list_runs(
    name: Annotated[str, typer.Option("--name", help="Only names with this part.")] = "",
    tag: Annotated[str, typer.Option("--tag", help="Only with this tag.")] = "",
    state: Annotated[str, typer.Option("--state", help="Only active or ended ones.")] = "",
    owner: Annotated[str, typer.Option("--owner", help="Only this owner's.")] = "",
    limit: Annotated[int, typer.Option("--limit", min=1, help="At most this many.")] = 20,
    every: Annotated[bool, typer.Option("--all", help="All of them.")] = False,
    data_dir: DataDir = None,
    as_json: JsonFlag = False,
) -> None:
    """List training runs, newest first, including ended ones.

    Example: tandem runs list --tag grpo --state active"""
    given = {"name": name, "tag": tag, "state": state, "owner": owner}
    filters = {key: value for key, value in given.items() if value}
    runs, total = run_names.list_runs(data_dir, filters, most=None if every else limit)
    end_if_json(as_json, {"runs": runs, "total_count": total})
    show_table(
        [
            Column("name", wrap=10),
            Column("id"),
            Column("state"),
            Column("step", right=True),
            Column("newest", wrap=11),
            Column("done", wrap=5),
            Column("created", wrap=10),
            Column("tags", wrap=10),
            Column("owner"),
            Column("base_model"),
        ],
        [
            (
                run["name"],
                run["id"],
                run["state"],
                step_of(run),
                main_value(run),
                done(run),
                moment(run["created_at"]),
                ", ".join(run["tags"]),
                run["owner"],
                ", ".join(filter(None, (run["base_model"], run["framework"]))),
            )
            for run in runs
        ],
        empty="No such runs." if filters else "No runs.",
    )
    say_rest(len(runs), total, "runs")


@app.command("set")
def set_run(
    run: RunArgument,
    name: Annotated[str | None, typer.Option("--name", help='A new name; "" removes it.')] = None,
    tags: Annotated[
        str | None, typer.Option("--tags", help='All tags, with commas; "" removes them.')
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(
            "--config", metavar="JSON|@FILE", help='A new configuration; "null" removes it.'
        ),
    ] = None,
    data_dir: DataDir = None,
    as_json: JsonFlag = False,
) -> None:
    """Name a run, or set its tags or configuration, also after its end.

    Example: tandem runs set s-0123456789ab:train:0 --name warm-up --tags grpo,8b"""
    changes: dict[str, object] = {}
    if name is not None:
        changes["name"] = name
    if tags is not None:
        changes["tags"] = [tag.strip() for tag in tags.split(",") if tag.strip()]
    if config is not None:
        changes["config"] = _read_config(config)
    if not changes:
        raise UserError("there is nothing to set; give --name, --tags or --config")
    answer = call(data_dir, "PATCH", f"runs/{run_in_url(data_dir, run)}", body=changes)
    end_if_json(as_json, answer)
    say(f"{answer['id']} has a new {' and a new '.join(changes)}.")


@app.command("stop")
def stop(
    run: RunArgument,
    discard: Annotated[
        bool, typer.Option("--discard", help="Save no checkpoint, and do not wait for one.")
    ] = False,
    data_dir: DataDir = None,
    as_json: JsonFlag = False,
) -> None:
    """Stop a run, and free its trainer.

    The running operation ends. Queued ones fail with run_stopped. Then the trainer saves the
    checkpoint stopped-STEP. Ctrl-C ends only the waiting, and the run still stops.

    Example: tandem runs stop my-run"""
    path, body = f"runs/{run_in_url(data_dir, run)}/stop", {"discard": discard}
    answer = call(data_dir, "POST", path, body=body, timeout=_STOP_SECONDS)
    already = answer["already"]
    if answer["state"] == "ending":
        say_aside("Waiting for the running operation and the save …")
    while answer["state"] == "ending":
        time.sleep(_POLL_SECONDS)  # an answer may come at once
        answer = call(data_dir, "POST", path, body=body, timeout=_STOP_SECONDS)
    answer["already"] = already
    end_if_json(as_json, answer)
    say(f"{run} {'had already ended' if already else 'is stopped'}: {answer['reason']}")
    if answer["checkpoint"] is not None:
        say(f"Newest checkpoint: {answer['checkpoint']}")


app.command("show")(run_show.show)
app.command("compare")(run_compare.compare)
app.command("export")(run_export.export)


def _read_config(given: str) -> Any:
    """Return the configuration of a JSON text, or of a file after `@`. Raises `UserError`."""
    text = Path(given[1:]).read_text(encoding="utf-8") if given.startswith("@") else given
    try:
        config = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise UserError(f"--config is not JSON: {error}") from error
    if config is not None and not isinstance(config, dict):
        raise UserError('--config is not an object, such as {"total_steps": 100}')
    return config
