"""`tandem runs`: list training runs, and show the metrics of their optimizer steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Any

import typer

from tandem.cli.context import (
    DataDir,
    JsonFlag,
    call,
    end_if_json,
    id_in_url,
    new_commands,
    say,
)
from tandem.cli.tables import Column, moment, show_table

app = new_commands("Training runs: list them, show their steps.")

_RUN = typer.Argument(help="Such as s-0123456789ab:train:0; `tandem runs list` lists them.")
_WIDTH, _HEIGHT = 60, 6
_CHARTED = ("loss", "kl_mean", "gap_mean", "staleness", "grad_norm")
_BARS = " ▁▂▃▄▅▆▇█"

Row = dict[str, Any]


@app.command("list")
def list_runs(
    limit: Annotated[int, typer.Option("--limit", min=1, max=1000, help="At most this many.")] = 20,
    data_dir: DataDir = None,
    as_json: JsonFlag = False,
) -> None:
    """List training runs, newest first, including ended ones."""
    answer = call(data_dir, "GET", f"runs?limit={limit}")
    end_if_json(as_json, answer)
    runs = answer["runs"]
    show_table(
        [
            Column("id"),
            Column("state"),
            Column("step", right=True),
            Column("loss", right=True),
            Column("created", wrap=10),
            Column("base_model"),
            Column("owner"),
        ],
        [
            (
                run["id"],
                run["state"],
                last["step"] if (last := run["last_step"]) else 0,
                _number(_metric(last, "loss")) if last else "",
                moment(run["created_at"]),
                run["base_model"],
                run["owner"],
            )
            for run in runs
        ],
        empty="No runs.",
    )
    if (total := answer["total_count"]) > len(runs):
        say(f"The newest {len(runs)} of {total} (--limit shows more)")


@app.command("show")
def show(
    run: Annotated[str, _RUN],
    last: Annotated[
        int, typer.Option("--last", "-n", min=1, max=1000, help="How many of the newest steps.")
    ] = 1000,
    data_dir: DataDir = None,
    as_json: JsonFlag = False,
) -> None:
    """Show a run with charts, its newest steps, and where their time went.

    Example: tandem runs show s-0123456789ab:train:0 --last 100"""
    path = f"runs/{id_in_url(run)}/steps?limit={last}"
    answer = call(data_dir, "GET", path)
    end_if_json(as_json, answer)
    about, steps = answer["run"], answer["steps"]
    kind = f"LoRA of rank {about['lora_rank']}" if about["lora_rank"] else "all parameters"
    say(f"{about['id']}: {about['base_model']}, {kind}, owner {about['owner']}")
    if (ranks := about["ranks"]) > 1:
        say(_layout(ranks, replicas=about["replicas"], together=about["tensor_parallel"]))
    ended = f", ended {moment(about['ended_at'])}" if about["ended_at"] else ""
    say(f"{about['state']}, created {moment(about['created_at'])}{ended} (UTC)")
    if about["reason"]:
        say(about["reason"])
    if engines := answer["engines"]:
        leaving = f", {engines['leaving']} leave" if engines["leaving"] else ""
        say(f"engines: {engines['serving']} of {engines['replicas']} serve{leaving}")
    if weights := answer["weights"]:
        say(_weights(weights))
    if memory := answer["memory"]:
        say(_memory(memory))
    if not steps:
        say("No optimizer steps.")
        return
    first, final = steps[0]["step"], steps[-1]["step"]
    if shares := _time_shares(steps):
        say(shares)
    named = {name: [_metric(step, name) for step in steps] for name in _CHARTED}
    shown = {name: values for name, values in named.items() if any(v is not None for v in values)}
    for name, values in shown.items():
        known = [value for value in values if value is not None]
        say(f"\n{name}, steps {first} to {final}: {_number(known[0])} → {_number(known[-1])}")
        say(chart(known))
    say("")
    show_table(
        [
            Column("step", right=True),
            *(Column(name, right=True) for name in shown),
            Column("tokens", right=True),
            Column("seconds", right=True),
            Column("weight_version"),
        ],
        [
            (
                step["step"],
                *(_number(_metric(step, name)) for name in shown),
                step["tokens"],
                f"{step['seconds']:.2f}",
                step["weight_version"].rpartition("/")[2],
            )
            for step in steps[-10:]
        ],
    )


def _layout(ranks: int, *, replicas: int, together: int) -> str:
    """Example: "8 ranks: 2 copies of the model, each on 4 ranks, 2 of which compute the same
    datums"."""
    copies = f"{replicas} copies of the model, each" if replicas > 1 else "one copy of the model"
    of_copy = ranks // replicas
    same = f", {together} of which compute the same datums" if together > 1 else ""
    return f"{ranks} ranks: {copies} on {of_copy} rank{'s'[: of_copy - 1]}{same}"


def _weights(weights: Row) -> str:
    """Example: "deltas are on; the last version has 193 MiB, of which 4 were written: it is a delta
    of v000002-9f2c41d0"."""
    deltas = f"deltas are {'on' if weights['deltas'] else 'off'}"
    if (last := weights["published"]) is None:
        return deltas
    text = f"{deltas}; the last version has {_mib(last['bytes'])} MiB"
    if not (whole := last["delta_of"].rpartition("/")[2]):
        return text
    written = _mib(last["written_bytes"])
    return f"{text}, of which {written} were written: it is a delta of {whole}"


def _memory(plan: Row) -> str:
    """Return a trainer's needed and available memory, largest parts first."""
    blocks = "checkpointed blocks" if plan["checkpointing"] else "blocks that keep all"
    lines = [f"memory of a rank, for {plan['micro_batch_tokens']} tokens at once, with {blocks}:"]
    for place in ("device", "host"):
        if parts := plan[place]:
            sizes = sorted(parts.items(), key=lambda part: -part[1])
            needed, available = sum(parts.values()), plan[f"{place}_available"]
            lines.append(
                f"  {place}: {_mib(needed)} of {_mib(available)} MiB ("
                f"{', '.join(f'{name} {_mib(size)}' for name, size in sizes)})"
            )
    return "\n".join(lines)


def _mib(size: int) -> int:
    return round(size / 2**20)


def chart(values: Sequence[float]) -> str:
    """Return a bar chart between labels of the largest and smallest value. A bar may be a mean of
    neighbours."""
    count = min(_WIDTH, len(values))
    bounds = [index * len(values) // count for index in range(count + 1)]
    means = [sum(values[start:end]) / (end - start) for start, end in pairwise(bounds)]
    low, high = min(means), max(means)
    top, eighths = len(_BARS) - 1, _HEIGHT * (len(_BARS) - 1)
    levels = [
        max(1, round((mean - low) / (high - low) * eighths)) if high > low else eighths // 2
        for mean in means
    ]
    labels = [_number(high), *[""] * (_HEIGHT - 2), _number(low)]
    width = max(9, *map(len, labels))
    return "\n".join(
        f"{label:>{width}} │"
        + "".join(_BARS[min(top, max(0, level - top * (_HEIGHT - 1 - row)))] for level in levels)
        for row, label in enumerate(labels)
    )


def _time_shares(steps: Sequence[Row]) -> str:
    """Example: "where the time went: samples 61 %, compute 30 %, client 9 %"."""
    sums: Counter[str] = Counter()
    for step in steps:
        for name, value in step["metrics"].items():
            if name.startswith("seconds/") and value:
                sums[name.removeprefix("seconds/")] += value
    whole = sums.pop("step", 0.0)
    shares = [(name, round(100 * value / whole)) for name, value in sums.most_common()]
    found = ", ".join(f"{name} {share} %" for name, share in shares if share)
    return f"where the time went: {found}" if found else ""


def _metric(step: Row, name: str) -> float | None:
    metrics: dict[str, float | None] = step["metrics"]
    return metrics.get(name)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
