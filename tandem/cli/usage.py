"""`tandem usage`: the use by each owner and run."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from tandem.cli.context import DataDir, JsonFlag, call, end_if_json, say
from tandem.cli.keys import parse_duration
from tandem.cli.tables import Column, byte_size, count, duration, show_table

_AMOUNTS = (
    Column("trained", right=True),
    Column("sampled", right=True),
    Column("accelerator", right=True),
    Column("storage", right=True),
    Column("prompts", right=True),
    Column("cached", right=True),
    Column("checkpoints", right=True),
)


def usage(
    since: Annotated[
        str,
        typer.Option(help="Count what was used in this time, such as 12h or 30d. Default: all."),
    ] = "",
    limit: Annotated[int, typer.Option("--limit", min=1, max=10_000, help="Runs, at most.")] = 50,
    data_dir: DataDir = None,
    as_json: JsonFlag = False,
) -> None:
    """Show the use by each owner and run.

    The table lists trained tokens, sampled tokens, prompt tokens, accelerator time, and the bytes
    of kept checkpoints.

    Example: tandem usage --since 30d"""
    start = time.time() - parse_duration(since) if since else 0
    answer = call(data_dir, "GET", f"usage?since={max(0.0, start):.0f}&limit={limit}")
    end_if_json(as_json, answer)
    if not answer["owners"]:
        say("Nothing was used.")
        return
    show_table(
        [Column("owner"), *_AMOUNTS],
        [(row["owner"], *_amounts(row)) for row in answer["owners"]],
        title="owners, with tokens trained and sampled:",
    )
    say("")
    show_table(
        [Column("run"), Column("owner"), *_AMOUNTS, Column("model")],
        [
            (row["run_id"], row["owner"], *_amounts(row), row["base_model"])
            for row in answer["runs"]
        ],
        title="runs, with samples from their weights:",
        empty="No runs.",
    )


def _amounts(row: dict[str, Any]) -> tuple[str, ...]:
    rest = ("prompt_tokens", "cached_tokens", "checkpoints")
    return (
        count(row["training_tokens"]),
        count(row["sampled_tokens"]),
        duration(row["accelerator_seconds"]),
        byte_size(row["checkpoint_bytes"]),
        *(count(row[name]) for name in rest),
    )
