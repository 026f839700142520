"""`tandem runs show`: one run with its record, its charts and its newest steps."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer

from tandem.cli.context import DataDir, JsonFlag, Row, call, end_if_json, say, say_aside, watch
from tandem.cli.run_charts import bar_chart, number, points_of
from tandem.cli.run_names import RunArgument, run_in_url
from tandem.cli.run_values import as_text, done, full_name, read_curves
from tandem.cli.tables import Column, moment, printable, show_table
from tandem.tracking.names import SERVER, flat, main_metric

_CHARTED = ("loss", "kl_mean", "gap_mean", "staleness", "grad_norm")
_NEWEST_STEPS = 10
_POLL_SECONDS = 1.0
_MOST_POINTS = 100_000


def show(
    run: RunArgument,
    metric: Annotated[
        list[str] | None,
        typer.Option("--metric", help="Only this metric; may be repeated."),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Print further steps until the end or Ctrl-C.")
    ] = False,
    last: Annotated[
        int, typer.Option("--last", "-n", min=1, max=1000, help="How many of the newest steps.")
    ] = 1000,
    data_dir: DataDir = None,
    as_json: JsonFlag = False,
) -> None:
    """Show a run with its charts, its newest steps, and where their time went.

    With --metric, show that curve; with --follow, also its further values.

    Example: tandem runs show my-run --metric reward --follow"""
    name = run_in_url(data_dir, run)
    about = call(data_dir, "GET", f"runs/{name}")
    if metric or follow:
        names = [full_name(each, about["last"], later=follow) for each in metric or []]
        if follow:
            _print_steps(_follow(data_dir, name, names, last=last), as_json=as_json)
            return
        curves = _curves(data_dir, name, names)
        end_if_json(as_json, {"metrics": curves})
        _say_curves(curves, last=last)
        return
    answer = call(data_dir, "GET", f"runs/{name}/steps?limit={last}")
    end_if_json(as_json, answer | {"run": about})
    _say_about(about, answer)
    steps = answer["steps"]
    if shares := _time_shares(steps):
        say(shares)
    own = [each for each in _main(about) if not each.startswith(SERVER)]
    _say_curves(_curves(data_dir, name, own), last=last)
    if not steps:
        say("No optimizer steps.")
        return
    charted = {
        name: [
            (step["step"], value)
            for step in steps
            if (value := step["metrics"].get(name)) is not None
        ]
        for name in _CHARTED
    }
    for name, points in charted.items():
        _say_chart(name, points)
    shown = [name for name, points in charted.items() if points]
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
                *(number(step["metrics"].get(name)) for name in shown),
                step["tokens"],
                f"{step['seconds']:.2f}",
                step["weight_version"].rpartition("/")[2],
            )
            for step in steps[-_NEWEST_STEPS:]
        ],
    )


def _say_about(about: Row, answer: Row) -> None:
    kind = f"LoRA of rank {about['lora_rank']}" if about["lora_rank"] else "all parameters"
    if about["name"] or about["tags"]:
        tags = f"  [{', '.join(about['tags'])}]" if about["tags"] else ""
        say(printable(f"{about['name'] or '(no name)'}{tags}"))
    framework = f", by {about['framework']}" if about["framework"] else ""
    say(f"{about['id']}: {about['base_model']}, {kind}{framework}, owner {about['owner']}")
    if (ranks := about["ranks"]) > 1:
        say(_layout(ranks, replicas=about["replicas"], together=about["tensor_parallel"]))
    ended = f", ended {moment(about['ended_at'])}" if about["ended_at"] else ""
    say(f"{about['state']}, created {moment(about['created_at'])}{ended} (UTC)")
    if about["reason"]:
        say(printable(about["reason"]))
    if about["parent_run"]:
        say(f"continues {about['parent_run']}")
    if progress := about["progress"]:
        of = f" of {progress['total_steps']}" if progress["total_steps"] else ""
        left = f" ({done(about)})" if done(about) else ""
        say(f"step {progress['step']}{of}{left}, updated {moment(progress['last_updated_at'])}")
    if newest := [(name, value) for name, value in about["last"].items() if SERVER not in name]:
        say("newest: " + ", ".join(printable(f"{name} {number(value)}") for name, value in newest))
    if config := about["config"]:
        say("configuration:")
        for name, value in flat(config).items():
            say(printable(f"  {name} = {as_text(value)}"))
    if engines := answer["engines"]:
        leaving = f", {engines['leaving']} leave" if engines["leaving"] else ""
        say(f"engines: {engines['serving']} of {engines['replicas']} serve{leaving}")
    if last := answer["published"]:
        say(f"the last version has {_mib(last['bytes'])} MiB")
    if memory := answer["memory"]:
        say(_memory(memory))


def _say_curves(curves: dict[str, Any], *, last: int) -> None:
    for name, curve in curves.items():
        _say_chart(name, points_of(curve)[-last:])


def _say_chart(name: str, points: Sequence[tuple[int, float]]) -> None:
    if not points:
        return
    (first, begin), (final, end) = points[0], points[-1]
    say("")
    say(printable(f"{name}, steps {first} to {final}: {number(begin)} → {number(end)}"))
    say(bar_chart([value for _, value in points]))


def _print_steps(steps: Iterator[tuple[int, Row]], *, as_json: bool) -> None:
    with suppress(KeyboardInterrupt):
        for step, values in steps:
            if as_json:
                print(orjson.dumps({"step": step, "values": values}).decode(), flush=True)
            else:
                shown = (f"{name} {number(value)}" for name, value in values.items())
                say(printable(f"step {step}  {'  '.join(shown)}"))


def _follow(
    data_dir: Path | None, run: str, names: list[str], *, last: int
) -> Iterator[tuple[int, Row]]:
    """Yield the newest steps, then further ones until the run ends."""
    newest, seen = -1, None

    def look() -> tuple[Row, dict[str, Any]]:
        about = call(data_dir, "GET", f"runs/{run}")
        if (about["last"], about["progress"]) == seen:
            return about, {}
        return about, _curves(data_dir, run, names or _main(about))

    for about, curves in watch(look, pause=_POLL_SECONDS):
        names, seen = names or list(curves), (about["last"], about["progress"])
        rows: defaultdict[int, Row] = defaultdict(dict)
        for name, curve in curves.items():
            for step, value in zip(curve["step"], curve["value"], strict=True):
                if step > newest:
                    rows[step][name] = value
        for step in sorted(rows)[-last:] if newest < 0 else sorted(rows):
            yield step, rows[step]
        newest = max([newest, *rows])
        if about["state"] == "ended":
            say_aside(f"The run has ended: {about['reason'] or about['state']}")
            return


def _main(about: Row) -> list[str]:
    name = main_metric(about["last"])
    return [name] if name else []


def _curves(data_dir: Path | None, run: str, names: Sequence[str]) -> dict[str, Any]:
    return read_curves(data_dir, run, names, points=_MOST_POINTS, lineage="true")


def _layout(ranks: int, *, replicas: int, together: int) -> str:
    """Example: "8 ranks: 2 copies of the model, each on 4 ranks, 2 of which compute the same
    datums"."""
    copies = f"{replicas} copies of the model, each" if replicas > 1 else "one copy of the model"
    of_copy = ranks // replicas
    same = f", {together} of which compute the same datums" if together > 1 else ""
    return f"{ranks} ranks: {copies} on {of_copy} rank{'s'[: of_copy - 1]}{same}"


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
