"""The metrics addresses of agents and workers, for Prometheus' HTTP service discovery. Workers
change with sessions, so a static list would soon be wrong."""

from __future__ import annotations

from gateway.api.dependencies import AccessDep
from gateway.api.fields import Answer
from gateway.api.routing import Router
from gateway.workers.worker import Worker

router = Router("/api/tandem/v1", tag="Tandem")


class TargetGroup(Answer):
    """`targets` are addresses, HOST:PORT, that answer GET /metrics. The labels are `worker`,
    `kind`, `__meta_tandem_session_id` and `__meta_tandem_run_id`. Prometheus drops `__meta_` labels
    by default. A worker's name contains its kind and session id, so metrics reveal session ids but
    not their owners. An agent has only the label `kind`."""

    targets: list[str]
    labels: dict[str, str]


@router.operation("GET", "/metrics/targets", role="metrics")
async def metrics_targets(access: AccessDep) -> list[TargetGroup]:
    """Return the metrics addresses of agents and workers in Prometheus' HTTP service discovery
    format. The gateway's own are at /metrics."""
    processes = access.gateway.processes
    agents = {launcher.metrics_address for launcher in processes.launchers.values()} - {""}
    return [
        *(TargetGroup(targets=[agent], labels={"kind": "agent"}) for agent in sorted(agents)),
        *(
            _target(record.worker)
            for record in processes.list_records()
            if record.worker is not None
        ),
    ]


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
