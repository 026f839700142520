"""`tandem blueprint`: lists, shows and runs blueprints."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from tandem.blueprints.catalog import blueprint_named, find_blueprints
from tandem.blueprints.description import about_blueprint
from tandem.blueprints.junit import junit_report
from tandem.blueprints.running import run_blueprint
from tandem.cli.context import (
    KEY_VARIABLE,
    URL_VARIABLE,
    DataDir,
    JsonFlag,
    call,
    chosen_gateway,
    end_if_json,
    new_commands,
    print_json,
    say,
    set_values,
)
from tandem.cli.tables import Column, show_table

_PARAMETERS = (
    Column("parameter"),
    Column("default"),
    Column("allowed", wrap=20),
    Column("about", wrap=30),
)

app = new_commands("Trainings that somebody else can repeat.")

Folders = Annotated[
    list[Path] | None,
    typer.Option("--folder", exists=True, file_okay=False, help="A folder of further blueprints."),
]
Name = Annotated[str, typer.Argument(metavar="NAME", help="See `tandem blueprint list`.")]


@app.command("list", here=True)
def list_blueprints(folders: Folders = None, as_json: JsonFlag = False) -> None:
    """List the blueprints.

    Example: tandem blueprint list"""
    found = find_blueprints(folders or ())
    end_if_json(
        as_json, {"blueprints": [about_blueprint(name, each) for name, each in found.items()]}
    )
    rows = [
        (name, each, "", "")
        if isinstance(each, str)
        else (name, each.title, each.needs.devices or "cores", f"{each.needs.minutes:g}")
        for name, each in found.items()
    ]
    columns = [Column("blueprint"), Column("title", wrap=30), Column("devices"), Column("minutes")]
    show_table(columns, rows, empty="No blueprints.")


@app.command("show", here=True)
def show(name: Name, folders: Folders = None, as_json: JsonFlag = False) -> None:
    """Show a blueprint's needs, parameters and bounds.

    Example: tandem blueprint show grpo-arithmetic"""
    blueprint = blueprint_named(name, folders or ())
    end_if_json(as_json, about_blueprint(name, blueprint))
    needs = blueprint.needs
    say(f"{blueprint.title}. {blueprint.about}")
    devices = f"{needs.devices} device{'s' * (needs.devices > 1)} of {needs.memory_gib:g} GiB"
    where = devices if needs.devices else "cores"
    say(f"It takes about {needs.minutes:g} minutes on {where}.")
    say(f"Models: {', '.join(blueprint.models)}")
    show_table(
        _PARAMETERS,
        [
            (
                parameter,
                str(each.default),
                ", ".join(map(str, each.choices)) or str(each.range),
                each.about,
            )
            for parameter, each in blueprint.parameters.items()
        ],
        empty="It has no parameters.",
    )
    for metric, bound in blueprint.metrics.items():
        say(f"A sound run ends with {metric} {bound}.")


@app.command("run")
def run(
    name: Name,
    model: Annotated[
        str, typer.Option("--model", help="A base model. Default: the first one that fits.")
    ] = "",
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="A parameter; may be repeated."),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0)] = 0,
    junit: Annotated[
        Path | None, typer.Option("--junit", dir_okay=False, help="Write a JUnit report.")
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option("--timeout", min=1, help="Seconds; default: ten times the usual time."),
    ] = None,
    folders: Folders = None,
    data_dir: DataDir = None,
    as_json: JsonFlag = False,
) -> None:
    """Train a blueprint, and compare its numbers with its bounds.

    Exits with status 1 if the program failed or a number is beyond its bound.

    Example: tandem blueprint run grpo-arithmetic --set steps=5 --junit report.xml"""
    blueprint = blueprint_named(name, folders or ())
    values = blueprint.values_of(set_values(settings or []))
    gateway = chosen_gateway(data_dir)
    result = run_blueprint(
        blueprint,
        model=blueprint.chosen_model(
            [each["name"] for each in call(data_dir, "GET", "models")["models"]], asked=model
        ),
        values=values,
        seed=seed,
        environment={**os.environ, URL_VARIABLE: gateway.url, KEY_VARIABLE: gateway.api_key},
        timeout=timeout,
    )
    if junit is not None:
        junit.write_text(junit_report(blueprint, result), encoding="utf-8")
    if as_json:
        print_json(asdict(result) | {"sound": result.sound})
    elif result.error:
        say(f"{name} failed after {result.seconds:g} s: {result.error}")
    else:
        for metric, value in result.numbers.items():
            bound, fault = blueprint.metrics.get(metric), result.violations.get(metric)
            told = f" (beyond its bound: {fault})" if fault else f" ({bound})" if bound else ""
            say(f"{metric}: {value:g}{told}")
        if result.weights:
            say(f"The tuned weights, for some hours: {result.weights}")
        say(f"{name} {'is sound' if result.sound else 'violates its bounds'}, {result.seconds:g} s")
    if not result.sound:
        raise typer.Exit(1)
