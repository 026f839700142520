"""`tandem doctor`: checks this machine, a cluster or a shared volume."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tandem.cli.context import DataDir, JsonFlag, print_json, resolve_data_dir, run_offline
from tandem.cli.tables import Column, show_table

_COLUMNS = (Column("level"), Column("name"), Column("value", wrap=24), Column("about", wrap=30))
_TIMEOUT = 600.0
"""Long, because a cluster gets many questions, and a volume's check waits for its peers."""


def doctor(
    cluster: Annotated[
        bool, typer.Option("--cluster", help="Check the Kubernetes cluster of the kubeconfig.")
    ] = False,
    namespace: Annotated[
        str, typer.Option(help="Tandem's namespace in the cluster.", show_default="tandem")
    ] = "",
    settings: Annotated[
        Path | None,
        typer.Option(help="For the cluster: an overlay's settings.env, before it is applied."),
    ] = None,
    volume: Annotated[
        Path | None, typer.Option(help="Check a folder that several hosts mount, on one of them.")
    ] = None,
    peers: Annotated[
        int, typer.Option(min=1, help="How many hosts check the volume at once, with this one.")
    ] = 1,
    meeting: Annotated[
        str, typer.Option(help="A name by which the peers find each other, new each time.")
    ] = "alone",
    data_dir: DataDir = None,
    as_json: JsonFlag = False,
) -> None:
    """Check this machine, a cluster or a shared volume.

    Exits with status 1 if Tandem needs something that does not work.

    Example: tandem doctor --cluster --settings k8s/overlays/mine/settings.env"""
    request = {
        "cluster": cluster,
        "namespace": namespace,
        "settings": str(settings) if settings else None,
        "volume": str(volume) if volume else None,
        "peers": peers,
        "meeting": meeting,
    }
    asked = "the cluster" if cluster else f"the volume {volume}" if volume else "this machine"
    answer = run_offline(
        "gateway.admin.doctor", resolve_data_dir(data_dir), request, asked=asked, timeout=_TIMEOUT
    )
    checks = answer["checks"]
    if as_json:
        print_json(answer)
    else:
        show_table(_COLUMNS, [[row[column.heading] for column in _COLUMNS] for row in checks])
    if any(row["level"] == "problem" for row in checks):
        raise typer.Exit(1)
