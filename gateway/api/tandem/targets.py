"""Where Prometheus finds the workers' metrics: its HTTP service discovery asks for it.

Workers come and go with sessions, so that a list in a file would be wrong within minutes.
"""

from __future__ import annotations

from gateway.api.dependencies import GatewayDep
from gateway.api.fields import Answer
from gateway.api.routing import Router
from gateway.workers.worker import Worker

router = Router("/api/tandem/v1", tag="Tandem")


class TargetGroup(Answer):
    """`targets` are addresses, HOST:PORT, which answer GET /metrics. The labels are `worker`,
    `kind`, `__meta_tandem_session_id` and `__meta_tandem_run_id`; Prometheus drops those that begin
    with `__meta_`, unless it is told to keep them. The name of a worker begins with its kind and
    its session's id: who reads the metrics sees which sessions there are, and not whose."""

    targets: list[str]
    labels: dict[str, str]


@router.operation("GET", "/metrics/targets", role="metrics")
async def metrics_targets(gateway: GatewayDep) -> list[TargetGroup]:
    """Return the addresses of the workers' metrics, as Prometheus' HTTP service discovery asks for
    them. The gateway's own are at /metrics."""
    return [_target(record.worker) for record in gateway.fleet.all() if record.worker is not None]


def _target(worker: Worker) -> TargetGroup:
    handle = worker.handle
    host, _, _ = handle.address.rpartition(":")
    labels = {
        "worker": handle.worker_id,
        "kind": handle.kind,
        "__meta_tandem_session_id": handle.session_id,
        "__meta_tandem_run_id": handle.run_id,
    }
    return TargetGroup(targets=[f"{host}:{handle.metrics_port}"], labels=labels)
