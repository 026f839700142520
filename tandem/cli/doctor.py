"""`tandem doctor`: checks this machine, a cluster, a shared volume or a job's needs."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from tandem.agent.preflight import JobNeeds, check_job, exit_code
from tandem.cli.context import DataDir, JsonFlag, print_json, resolve_data_dir, run_offline
from tandem.cli.tables import Column, show_table
from tandem.errors import UserError

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
    worker: Annotated[
        bool, typer.Option("--worker", help="Check whether a job could start on this machine.")
    ] = False,
    job: Annotated[
        typer.FileText | None,
        typer.Option(help="For --worker: the job's needs in JSON, - for standard input."),
    ] = None,
    data_dir: DataDir = None,
    as_json: JsonFlag = False,
) -> None:
    """Check this machine, a cluster, a shared volume or a job's needs.

    Exits with status 1 if Tandem needs something that does not work. With --worker, the status is
    10 for software, 20 for devices, and 30 for storage or network.

    Example: tandem doctor --cluster --settings k8s/overlays/mine/settings.env"""
    if worker:
        raise typer.Exit(_check_worker(job, as_json=as_json))
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
    _show(answer, as_json=as_json)
    if any(row["level"] == "problem" for row in answer["checks"]):
        raise typer.Exit(1)


def _check_worker(job: typer.FileText | None, *, as_json: bool) -> int:
    if job is None:
        raise UserError("--worker needs the job's needs: name their file with --job")
    try:
        needs = JobNeeds.model_validate_json(job.read())
    except ValidationError as error:
        faults = (f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
        raise UserError(f"{job.name} has no needs of a job: {'; '.join(faults)}") from error
    checks = tuple(check_job(needs))
    rows = [asdict(each) | {"level": "problem" if each.fault else "ok"} for each in checks]
    _show({"checks": rows, "code": exit_code(checks)}, as_json=as_json)
    return exit_code(checks)


def _show(answer: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(answer)
    else:
        rows = [[row[column.heading] for column in _COLUMNS] for row in answer["checks"]]
        show_table(_COLUMNS, rows)
