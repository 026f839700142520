"""`tandem demo`: reinforcement learning of a model small enough for two cores."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Annotated

import typer

from tandem.agent.host import this_host
from tandem.cli.context import err, out, read_settings, resolve_data_dir
from tandem.cli.up import interrupt
from tandem.demo.configuration import DemoConfiguration
from tandem.stack import Endpoint
from tandem.stack.host_summary import usual_ranks


def demo(
    out_dir: Annotated[
        Path | None, typer.Option("--out", help="Run directory. Default: runs/demo-….")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of model, data and samples.")] = 0,
    ranks: Annotated[
        int | None,
        typer.Option(min=1, max=64, help="Trainer processes. Default: 1 on a GPU, 2 without."),
    ] = None,
    data_dir: Annotated[
        Path, typer.Option("--data-dir", help="Where models and the warm-up are kept.")
    ] = Path(".tandem/demo"),
    save: Annotated[
        str, typer.Option(metavar="NAME", help="Keep the trained weights as a checkpoint.")
    ] = "",
    base_url: Annotated[
        str,
        typer.Option(
            help="A gateway that runs, instead of one that the demo starts. It needs the base "
            "model, tandem/tiny-addition-SEED (`python -m tandem.demo.tiny_model` writes it), and "
            "TINKER_API_KEY a key of it."
        ),
    ] = "",
) -> None:
    """Train a tiny model by reinforcement learning and plot its reward.

    Example: tandem demo --seed 1 --save final"""
    from tandem.demo.run import default_out, run_demo

    endpoint = None
    resolve_data_dir(data_dir)  # refuses --url
    if base_url:
        if ranks is not None:
            raise typer.BadParameter(
                f"--ranks is for a gateway that the demo starts; the one at {base_url} says its own"
            )
        key = os.environ.get("TINKER_API_KEY", "")
        endpoint = Endpoint(url=base_url.rstrip("/"), pid=0, api_key=key)
    configuration = DemoConfiguration(
        out=out_dir or default_out(Path("runs"), seed=seed),
        data_dir=data_dir,
        seed=seed,
        ranks=None if endpoint else ranks or usual_ranks(read_settings(), this_host()),
        save=save,
        endpoint=endpoint,
    )
    signal.signal(signal.SIGTERM, interrupt)
    try:
        run_demo(configuration, console=out)
    except KeyboardInterrupt:
        err.print(
            "\nInterrupted. Everything that it started is stopped; a completed warm-up is kept."
        )
        raise typer.Exit(130) from None
