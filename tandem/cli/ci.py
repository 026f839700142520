"""`tandem ci`: decides whether an event of a build system starts a run on GPUs."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import Annotated

import orjson
import typer

from tandem.blueprints.approval import ApprovalRules, decide
from tandem.cli.context import JsonFlag, new_commands, print_json, say
from tandem.errors import InvalidRequest

SKIP_STATUS = 3

app = new_commands("GPU runs that a maintainer approves.")


@app.command("decide", here=True)
def decide_event(
    event: Annotated[
        typer.FileText,
        typer.Argument(
            metavar="FILE", encoding="utf-8", help="GitHub's event in JSON, - for stdin."
        ),
    ],
    changed: Annotated[
        typer.FileText | None,
        typer.Option(encoding="utf-8", help="The changed paths, one a line. Default: unknown."),
    ] = None,
    commit: Annotated[
        str, typer.Option(help="The commit of a manual or scheduled start, such as GITHUB_SHA.")
    ] = "",
    maintainers: Annotated[
        str, typer.Option(metavar="LOGINS", help="The accounts whose label counts, with commas.")
    ] = "",
    environment: Annotated[
        str, typer.Option(metavar="NAME", help="A protected environment that the job waits in.")
    ] = "",
    as_json: JsonFlag = False,
) -> None:
    """Decide whether an event starts a run on GPUs, and of which commit.

    Prints run, commit and reason in lines for $GITHUB_OUTPUT. Exits with status 0 to run, 3 to
    skip, 1 for a malformed event, and 2 for a wrong option.

    Example: tandem ci decide event.json --changed paths.txt --maintainers ann,ben"""
    try:
        read = orjson.loads(event.read())
    except ValueError as error:
        raise InvalidRequest(f"{event.name} is no JSON: {error}") from error
    paths = [line.rstrip("\r\n") for line in changed or ()]
    rules = ApprovalRules(
        maintainers=frozenset(filter(None, re.split(r"[\s,]+", maintainers))),
        environment=environment,
    )
    decision = decide(read, rules, commit=commit, changed=[path for path in paths if path])
    if as_json:
        print_json(asdict(decision))
    else:
        say(f"run={str(decision.run).lower()}")
        say(f"commit={decision.commit}")
        say(f"reason={decision.reason}")
    if not decision.run:
        raise typer.Exit(SKIP_STATUS)
