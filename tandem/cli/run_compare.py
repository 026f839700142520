"""`tandem runs compare`: runs side by side, with the differences of their configurations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from string import ascii_uppercase
from typing import Annotated, Any

import typer

from tandem.cli.context import DataDir, JsonFlag, Row, call, end_if_json, say
from tandem.cli.run_charts import number, overlay_chart, points_of
from tandem.cli.run_names import run_in_url
from tandem.cli.run_values import as_text, done, full_name, read_curves, step_of
from tandem.cli.tables import Column, printable, show_table
from tandem.errors import UserError
from tandem.tracking.names import SERVER, flat, main_metric

_MOST_METRICS = 12
_ABSENT = "-"
_SECONDS = f"{SERVER}seconds/"
"""`runs show` has their shares."""


def compare(
    runs: Annotated[list[str], typer.Argument(metavar="RUN RUN…", help="Ids or names, two to 26.")],
    metric: Annotated[
        list[str] | None,
        typer.Option("--metric", help="Draw this one; may be repeated. Default: reward or loss."),
    ] = None,
    data_dir: DataDir = None,
    as_json: JsonFlag = False,
) -> None:
    """Compare runs: their newest and best values, curves, and the differing configuration.

    Example: tandem runs compare warm-up cold-start --metric reward"""
    if not 2 <= len(runs) <= len(ascii_uppercase):
        raise UserError(f"name two to {len(ascii_uppercase)} runs; here are {len(runs)}")
    found = [call(data_dir, "GET", f"runs/{run_in_url(data_dir, run)}") for run in runs]
    names = _names(found, metric or [])
    curves = [read_curves(data_dir, run["id"], names, lineage="true") for run in found]
    best = {name: [_best(name, of_run.get(name)) for of_run in curves] for name in names}
    differing = _differences(found)
    end_if_json(
        as_json,
        {
            "runs": found,
            "best": best,
            "config_differences": differing,
            "curves": [
                {"run": run["id"], "metrics": its} for run, its in zip(found, curves, strict=True)
            ],
        },
    )
    letters = ascii_uppercase[: len(found)]
    for letter, run in zip(letters, found, strict=True):
        say(printable(f"{letter}: {run['name'] or '(no name)'}, {run['id']}"))
    say("")
    _show("", letters, [*_about(found, best), *_last_values(found)])
    if differing:
        say("")
        rows = [(name, *map(as_text, values)) for name, values in differing.items()]
        _show("configuration", letters, rows)
    else:
        say("\nTheir configurations are equal.")
    for name in names:
        points = [points_of(its[name]) if name in its else [] for its in curves]
        if any(points):
            say("")
            say(printable(name))
            say(overlay_chart(points))


def _names(runs: Sequence[Row], given: Sequence[str]) -> list[str]:
    last = {name: value for run in runs for name, value in run["last"].items()}
    if given:
        return [full_name(each, last) for each in given]
    main = main_metric(last)
    return [main] if main else []


def _best(name: str, curve: dict[str, Any] | None) -> Row | None:
    """Return the best value and its step: a loss's least, another metric's greatest."""
    if not (points := points_of(curve) if curve else []):
        return None
    choose: Callable[..., tuple[int, float]] = min if name.endswith("loss") else max
    step, value = choose(points, key=lambda point: point[1])
    return {"step": step, "value": value}


def _about(runs: Sequence[Row], best: dict[str, list[Row | None]]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [
        ("state", *(run["state"] for run in runs)),
        ("step", *(str(step_of(run)) for run in runs)),
        ("done", *(done(run) for run in runs)),
        ("base model", *(run["base_model"] for run in runs)),
        ("LoRA rank", *(str(run["lora_rank"] or "") for run in runs)),
    ]
    for name, values in best.items():
        shown = [f"{number(v['value'])} (step {v['step']})" if v else "" for v in values]
        rows.append((f"best {name}", *shown))
    return [row for row in rows if any(row[1:])]


def _last_values(runs: Sequence[Row]) -> list[tuple[str, ...]]:
    """Return the newest values of the user's metrics, then of the server's, a few of them."""
    names = {name for run in runs for name in run["last"] if not name.startswith(_SECONDS)}
    chosen = sorted(names, key=lambda name: (name.startswith(SERVER), name))[:_MOST_METRICS]
    return [(name, *(number(run["last"].get(name)) for run in runs)) for name in chosen]


def _differences(runs: Sequence[Row]) -> dict[str, list[object]]:
    configs = [flat(run["config"] or {}) for run in runs]
    names = sorted({name for config in configs for name in config})
    found = {name: [config.get(name, _ABSENT) for config in configs] for name in names}
    return {name: values for name, values in found.items() if any(v != values[0] for v in values)}


def _show(heading: str, letters: str, rows: Sequence[Sequence[object]]) -> None:
    show_table([Column(heading, wrap=12), *(Column(letter, wrap=10) for letter in letters)], rows)
