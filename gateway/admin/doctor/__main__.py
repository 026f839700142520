"""`python -m gateway.admin.doctor`: a request from standard input, the checks as JSON."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson

from gateway.admin.doctor.check import Check
from gateway.admin.doctor.cluster import ClusterChecks, api_server, read_settings
from gateway.admin.doctor.host import check_host
from gateway.admin.doctor.volume import check_volume
from tandem.agent.host import this_host
from tandem.errors import TandemError
from tandem.settings.gateway import GatewaySettings


def run_checks(request: Mapping[str, Any]) -> Iterator[Check]:
    settings = GatewaySettings()
    if request["cluster"]:
        file = read_settings(Path(request["settings"])) if request["settings"] else None
        namespace = request["namespace"] or settings.kubernetes.namespace or "tandem"
        instance = settings.kubernetes.instance
        cluster = ClusterChecks(api_server(), namespace=namespace, instance=instance, file=file)
        yield from cluster.run()
    if request["volume"]:
        name, peers = socket.gethostname(), request["peers"]
        folder = Path(request["volume"])
        yield from check_volume(folder, name=name, peers=peers, meeting=request["meeting"])
    if not request["cluster"] and not request["volume"]:
        yield from check_host(settings, this_host())


def main() -> int:
    answer: dict[str, object]
    try:
        answer = {"checks": list(run_checks(orjson.loads(sys.stdin.buffer.read())))}
    except TandemError as error:
        answer = {"error": error.message}
    sys.stdout.buffer.write(orjson.dumps(answer))
    return 1 if "error" in answer else 0


if __name__ == "__main__":
    sys.exit(main())
