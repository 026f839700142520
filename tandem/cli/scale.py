"""`tandem scale`: the number of engines of a run or sampling session."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import quote

import typer

from tandem.cli.context import DataDir, JsonFlag, call, end_if_json, say
from tandem.cli.run_names import run_in_url

_ANSWER = 60.0
"""Seconds added to the wait for places."""


def scale(
    target: Annotated[
        str,
        typer.Argument(help="A run (id or name), a sampling session, or a session."),
    ],
    replicas: Annotated[
        int | None, typer.Option("--replicas", "-n", min=1, max=64, help="How many engines.")
    ] = None,
    least: Annotated[
        int, typer.Option("--min", min=0, max=64, help="Least engines, with --max.")
    ] = 1,
    most: Annotated[
        int | None,
        typer.Option("--max", min=1, max=64, help="Most engines. The number follows the queue."),
    ] = None,
    wait: Annotated[
        float, typer.Option(min=0, max=600, help="Seconds for which new ones wait for places.")
    ] = 0.0,
    data_dir: DataDir = None,
    as_json: JsonFlag = False,
) -> None:
    """Set the number of engines of a run or sampling session.

    Sampling continues meanwhile.

    Examples: tandem scale s-0123456789ab:train:0 --replicas 4 --wait 60
    and tandem scale s-0123456789ab:train:0 --min 0 --max 3"""
    # Ids of sessions and sampling sessions begin like those of runs.
    is_id = target.startswith("s-") and "/" not in target
    path = quote(target, safe=":") if is_id else run_in_url(data_dir, target)
    answer = call(
        data_dir,
        "PUT",
        f"samplers/{path}/replicas",
        body={"replicas": replicas, "min": least, "max": most, "wait": wait},
        timeout=wait + _ANSWER,
    )
    end_if_json(as_json, answer)
    leaving = f"; {answer['leaving']} end what they have" if answer["leaving"] else ""
    follows = f". From {least} to {most} will follow the queue" if most else ""
    say(
        f"{answer['base_model']} is served by {answer['replicas']} engines, of which "
        f"{answer['serving']} answer now{leaving}{follows} (`tandem status` shows each)."
    )
