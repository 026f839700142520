"""`tandem runs stop`: end a run before its session."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from tandem.cli.context import DataDir, JsonFlag, call, end_if_json, say, say_aside
from tandem.cli.run_names import RunArgument, run_in_url

_TIMEOUT = 60.0
_PAUSE = 0.5


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
    answer = call(data_dir, "POST", path, body=body, timeout=_TIMEOUT)
    already = answer["already"]
    told = False
    while answer["state"] == "ending":
        if not told and not as_json:
            say_aside("Waiting for the running operation and the save …")
        told = True
        time.sleep(_PAUSE)  # an answer may come at once
        answer = call(data_dir, "POST", path, body=body, timeout=_TIMEOUT)
    answer["already"] = already
    end_if_json(as_json, answer)
    say(f"{run} {'had already ended' if already else 'is stopped'}: {answer['reason']}")
    if answer["checkpoint"] is not None:
        say(f"Newest checkpoint: {answer['checkpoint']}")
