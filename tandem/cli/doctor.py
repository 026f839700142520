"""`tandem doctor`: what this machine, a cluster or a volume can do, and what is missing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, cast

import typer

from tandem.cli.context import DataDir, JsonFlag, print_json, resolve_data_dir, run_offline
from tandem.cli.tables import Column, show_table
from tandem.errors import UserError

_COLUMNS = (Column("level"), Column("name"), Column("value", wrap=24), Column("about", wrap=30))
_LONGEST_ANSWER = 600.0
"""Of a cluster that is asked many questions, or of peers that are waited for."""


def doctor(
    cluster: Annotated[
        bool,
        typer.Option("--cluster", help="Examine the Kubernetes cluster of the kubeconfig instead."),
    ] = False,
    namespace: Annotated[
        str, typer.Option(help="Of the cluster, where Tandem is.", show_default="tandem")
    ] = "",
    settings: Annotated[
        Path | None,
        typer.Option(help="Of the cluster: an overlay's settings.env, before it is applied."),
    ] = None,
    volume: Annotated[
        Path | None,
        typer.Option(help="Examine a folder instead that several hosts mount, from one of them."),
    ] = None,
    peers: Annotated[
        int, typer.Option(min=1, help="How many hosts examine the volume at once, this included.")
    ] = 1,
    meeting: Annotated[
        str, typer.Option(help="A name by which the peers know each other, new each time.")
    ] = "alone",
    data_dir: DataDir = None,
    as_json: JsonFlag = False,
) -> None:
    """Examine this machine: devices, memory, libraries, and the device groups there would be. Exits
    with status 1 if something that is needed does not work."""
    if cluster and volume is not None:
        raise UserError("--cluster and --volume are two questions: ask one")
    module, asked, request = "gateway.doctor", "this machine", dict[str, object]()
    if cluster:
        module, asked = "gateway.cluster_doctor", "the cluster"
        request = {"namespace": namespace, "settings": str(settings) if settings else ""}
    elif volume is not None:
        module, asked = "gateway.volume_doctor", f"the volume {volume}"
        request = {"volume": str(volume), "peers": peers, "meeting": meeting}
    answer = run_offline(
        module, resolve_data_dir(data_dir), request, asked=asked, timeout=_LONGEST_ANSWER
    )
    findings = cast(list[dict[str, str]], answer["findings"])
    if as_json:
        print_json(answer)
    else:
        show_table(_COLUMNS, [[row[column.heading] for column in _COLUMNS] for row in findings])
    if any(row["level"] == "problem" for row in findings):
        raise typer.Exit(1)
