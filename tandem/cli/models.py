"""`tandem models`: the base models of the gateway."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, Any
from urllib.parse import quote

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from tandem.cli.context import (
    DataDir,
    JsonFlag,
    call,
    distant_url,
    end_if_json,
    err,
    fail,
    new_commands,
    read_settings,
    resolve_data_dir,
    say,
    say_aside,
)
from tandem.cli.hub import Show, Wanted, add_model
from tandem.cli.tables import Column, byte_size, show_table
from tandem.errors import UserError
from tandem.stack import read_endpoint

app = new_commands("Base models: add, remove and list.")

_HUB = "https://huggingface.co"
_LINE_SECONDS = 10.0
"""Seconds between two progress lines without a terminal."""


@app.command("add")
def add(
    name: Annotated[
        str,
        typer.Argument(help="ORG/NAME at the hub (HF_ENDPOINT, HF_TOKEN); or, with PATH, a name."),
    ],
    path: Annotated[
        Path | None,
        typer.Argument(help="A directory in the Hugging Face layout; nothing is downloaded."),
    ] = None,
    revision: Annotated[
        str, typer.Option(help="A branch, a tag or a commit to download.", show_default="main")
    ] = "",
    as_name: Annotated[
        str, typer.Option("--name", help="What clients call it.", show_default="ORG/NAME")
    ] = "",
    directory: Annotated[
        Path | None,
        typer.Option("--dir", help="The models directory (TANDEM_MODELS_DIR)."),
    ] = None,
    data_dir: DataDir = None,
    as_json: JsonFlag = False,
) -> None:
    """Download a base model, or register one from disk.

    A downloaded model goes into the models directory of this machine, where gateways find it. With
    PATH, the running gateway registers that directory of its machine under the name.

    Example: tandem models add Qwen/Qwen3-0.6B"""
    if path is None:
        if url := distant_url(data_dir):
            raise UserError(
                f"a download goes to this machine, not to the one of {url}; run the command there, "
                "or name a PATH of that machine"
            )
        _download(name, revision, as_name, directory, data_dir, as_json)
        return
    if revision or as_name or directory:
        raise UserError("with PATH nothing is downloaded: drop --revision, --name and --dir")
    answer = _register(data_dir, name, path)
    end_if_json(as_json, answer)
    say(f"{name} is registered.")
    if answer["note"]:
        say(f"Note: {answer['note']}.")


def _download(
    repository: str,
    revision: str,
    name: str,
    directory: Path | None,
    data_dir: Path | None,
    as_json: bool,
) -> None:
    settings, folder = read_settings(), resolve_data_dir(data_dir)
    wanted = Wanted(
        hub=os.environ.get("HF_ENDPOINT", _HUB).rstrip("/"),
        repository=repository,
        revision=revision or "main",
        name=name or repository,
        directory=(directory or settings.models_dir or folder / "models").absolute(),
        spare=settings.min_free_bytes,
    )
    with _interruptible(), _progress() as show:
        added = add_model(wanted, say=say_aside, show=show)
    notes = list(added.notes)
    if registered := read_endpoint(folder) is not None:
        answer = _register(data_dir, wanted.name, added.folder)
        notes += [answer["note"]] if answer["note"] else []
    record = added.record.model_dump(exclude={"added_at"})
    about = {"downloaded_bytes": added.downloaded, "registered": registered, "notes": notes}
    end_if_json(as_json, {"name": wanted.name, "path": added.folder, **record, **about})
    was = "is there" if added.downloaded else "was there already"
    say(f"{wanted.name} {was}: {added.folder}, {byte_size(added.record.bytes)}.")
    say(
        "The gateway has it now."
        if registered
        else f"A gateway whose models directory (TANDEM_MODELS_DIR) is {wanted.directory} finds it "
        "within ten seconds, or when it starts."
    )
    for note in notes:
        say(f"Note: {note}.")


def _register(data_dir: Path | None, name: str, path: Path) -> Any:
    # On another machine, this machine's links and folders mean nothing.
    where = path if distant_url(data_dir) else path.resolve()
    body = {"name": name, "path": str(where)}
    return call(data_dir, "POST", "models", body=body)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Exit at once on a signal. A normal end would wait for the download threads."""

    def end(number: int, _frame: FrameType | None) -> None:
        fail("interrupted; files that are complete are kept: run the command again to go on")
        os._exit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _progress() -> Iterator[Show]:
    """Show a download on standard error: a bar on a terminal, else a line now and then."""
    if not err.is_terminal:
        yield _Lines()
        return
    columns = (TextColumn("Downloading"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=err, transient=True) as progress:
        bar = progress.add_task("")
        yield lambda there, total: progress.update(bar, completed=there, total=total)


class _Lines:
    """Prints lines such as `1.2 GiB of 15.3 GiB (7 %), 48.1 MiB/s`."""

    def __init__(self) -> None:
        self._at: float | None = None
        self._there = 0

    def __call__(self, there: int, total: int) -> None:
        now = time.monotonic()
        if self._at is None:
            self._at, self._there = now, there
        elif (passed := now - self._at) >= _LINE_SECONDS:
            rate = byte_size(max(0.0, (there - self._there) / passed))
            share = 100 * there // max(total, 1)
            say_aside(f"{byte_size(there)} of {byte_size(total)} ({share} %), {rate}/s")
            self._at, self._there = now, there


@app.command("remove")
def remove(
    name: Annotated[str, typer.Argument(help="The name that clients use.")],
    data_dir: DataDir = None,
    as_json: JsonFlag = False,
) -> None:
    """Remove a base model's name.

    Its files stay. Runs and engines that use it continue until their session ends or the gateway
    restarts.

    Example: tandem models remove my/model"""
    call(data_dir, "DELETE", f"models/{quote(name)}")
    end_if_json(as_json, {"removed": name})
    say(f"{name} is no longer registered.")


@app.command("list")
def list_models(data_dir: DataDir = None, as_json: JsonFlag = False) -> None:
    """List the registered base models.

    Example: tandem models list --json"""
    answer = call(data_dir, "GET", "models")
    end_if_json(as_json, answer)
    show_table(
        [Column("name"), Column("path", wrap=30), Column("max length", right=True)],
        [(model["name"], model["path"], model["max_length"]) for model in answer["models"]],
    )
