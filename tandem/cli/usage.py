"""`tandem usage`: the use by each owner and run."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from tandem.cli.context import DataDir, JsonFlag, call, end_if_json, say
from tandem.cli.keys import parse_duration
from tandem.cli.run_names import run_in_url
from tandem.cli.tables import Column, byte_size, count, duration, id_column, show_table

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
    run: Annotated[
        str, typer.Option("--run", help="Show one run: seconds, processors, devices, memory.")
    ] = "",
    limit: Annotated[int, typer.Option("--limit", min=1, max=9_999, help="Runs, at most.")] = 50,
    data_dir: DataDir = None,
    as_json: JsonFlag = False,
) -> None:
    """Show the use by each owner and run.

    The table lists trained tokens, sampled tokens, prompt tokens, accelerator time, and the bytes
    of kept checkpoints.

    Examples: tandem usage --since 30d
    tandem usage --run s-0123456789ab:train:0"""
    if run:
        _show_run(data_dir, run, as_json=as_json)
        return
    start = time.time() - parse_duration(since) if since else 0
    answer = call(data_dir, "GET", f"usage?since={max(0.0, start):.0f}&limit={limit + 1}")
    more = len(answer["runs"]) > limit
    answer["runs"] = answer["runs"][:limit]
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
        [
            id_column("run", [row["run_id"] for row in answer["runs"]]),
            Column("owner"),
            *_AMOUNTS,
            Column("model"),
        ],
        [
            (
                f"{row['run_id']} {row['name']}".strip(),
                row["owner"],
                *_amounts(row),
                row["base_model"],
            )
            for row in answer["runs"]
        ],
        title="runs, with samples from their weights:",
        empty="No runs.",
    )
    if more:
        say(f"The first {limit} runs (--limit shows more)")


def _amounts(row: dict[str, Any]) -> tuple[str, ...]:
    rest = ("prompt_tokens", "cached_tokens", "checkpoints")
    return (
        count(row["training_tokens"]),
        count(row["sampled_tokens"]),
        duration(row["accelerator_seconds"]),
        byte_size(row["checkpoint_bytes"]),
        *(count(row[name]) for name in rest),
    )


def _show_run(data_dir: Path | None, run: str, *, as_json: bool) -> None:
    """Print the use of one run. A hyphen is an unknown value."""
    answer = call(data_dir, "GET", f"runs/{run_in_url(data_dir, run)}/usage")
    end_if_json(as_json, answer)
    parts = {name: answer[name] for name in ("trainer", "sampler") if answer[name]}
    show_table(
        [Column(""), *(Column(name, right=True) for name in parts)],
        [
            (
                label,
                *(show(part[name]) if part[name] is not None else "-" for part in parts.values()),
            )
            for label, name, show in _RESOURCES
            if any(part[name] is not None for part in parts.values())
        ],
        empty="No workers.",
    )
    if any(part["measured"] == "shared" for part in parts.values()):
        say("The GPU figures are those of the devices, with other processes on them (shared).")
    trained, sampled = count(answer["training_tokens"]), count(answer["sampled_tokens"])
    prompts, cached = count(answer["prompt_tokens"]), count(answer["cached_tokens"])
    say(f"tokens: {trained} trained, {sampled} sampled, {prompts} of prompts ({cached} cached)")
    stored, record = byte_size(answer["checkpoint_bytes"]), byte_size(answer["record_bytes"])
    say(f"checkpoints: {stored}, record: {record}")


def _percent(value: float) -> str:
    return f"{100 * value:.0f} %"


_RESOURCES: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("queue", "queue_seconds", duration),
    ("start", "start_seconds", duration),
    ("run", "run_seconds", duration),
    ("computing", "compute_seconds", duration),
    ("duty", "duty", _percent),
    ("share of the workers", "share", _percent),
    ("CPU average, cores", "cpu_average", "{:.2f}".format),
    ("memory, peak", "memory_peak_bytes", byte_size),
    ("GPU average", "gpu_average", _percent),
    ("GPU peak", "gpu_peak", _percent),
    ("GPU memory, peak", "gpu_memory_peak_bytes", byte_size),
)
