"""`python -m gateway.admin.doctor`, which `tandem doctor` starts, answers with checks."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel

from gateway.admin.doctor.check import Check
from gateway.admin.doctor.cluster import ClusterChecks, api_server, read_settings
from gateway.admin.doctor.host import check_host
from gateway.admin.doctor.volume import check_volume
from gateway.admin.request import answer_request
from tandem.agent.host import this_host
from tandem.settings.gateway import GatewaySettings


class ChecksRequest(BaseModel):
    """The options of `tandem doctor`."""

    cluster: bool
    namespace: str
    settings: Path | None
    volume: Path | None
    peers: int
    meeting: str


def run_checks(request: ChecksRequest, settings: GatewaySettings) -> Iterator[Check]:
    if request.cluster:
        file = read_settings(request.settings) if request.settings else None
        namespace = request.namespace or settings.kubernetes.namespace or "tandem"
        instance = settings.kubernetes.instance
        cluster = ClusterChecks(api_server(), namespace=namespace, instance=instance, file=file)
        yield from cluster.run()
    if request.volume:
        name = socket.gethostname()
        yield from check_volume(
            request.volume, name=name, peers=request.peers, meeting=request.meeting
        )
    if not request.cluster and not request.volume:
        yield from check_host(settings, this_host())


def _answer(request: ChecksRequest, settings: GatewaySettings) -> dict[str, object]:
    return {"checks": list(run_checks(request, settings))}


if __name__ == "__main__":
    sys.exit(answer_request(ChecksRequest, _answer))
