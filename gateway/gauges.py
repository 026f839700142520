"""Gauges that are computed at each scrape."""

from __future__ import annotations

from collections.abc import Callable

from gateway.futures.table import FutureTable
from gateway.limits.quotas import Quotas
from gateway.metrics import Metrics
from gateway.runs.registry import RunRegistry
from gateway.sampling.router import SamplerRouter
from gateway.sessions.registry import SessionRegistry
from gateway.workers.fleet import Fleet


def register_gauges(
    metrics: Metrics,
    *,
    sessions: SessionRegistry,
    runs: RunRegistry,
    fleet: Fleet,
    samplers: SamplerRouter,
    futures: FutureTable,
    limits: Quotas,
) -> None:
    """Register a gauge for each count of things in these parts."""
    gauges: tuple[tuple[str, str, Callable[[], float]], ...] = (
        ("sessions", "Active sessions.", lambda: len(sessions.all())),
        (
            "runs",
            "Training runs that have not ended.",
            lambda: sum(1 for run in runs.all() if run.state != "ended"),
        ),
        ("workers", "Workers that start or serve.", lambda: len(fleet.all())),
        (
            "queued_operations",
            "Operations that have not ended.",
            lambda: sum(run.dispatcher.queued for run in runs.all()),
        ),
        (
            "waiting_samples",
            "Samples that have not ended.",
            lambda: sum(sampler.waiting for sampler in samplers.all()),
        ),
        ("futures", "Futures in memory, with and without a result.", lambda: len(futures)),
        (
            "queued_bytes",
            "Bytes of the payloads on disk of operations that have not ended.",
            lambda: limits.operation_bytes.total,
        ),
        ("held_bytes", "Bytes of the requests that wait in memory.", lambda: limits.held.total),
        (
            "body_bytes",
            "Bytes of the bodies that are being received or handled.",
            lambda: limits.bodies.total,
        ),
        (
            "open_requests",
            "Requests that are being answered, including long polls.",
            lambda: limits.requests.total,
        ),
        (
            "result_bytes",
            "Bytes of the results in memory that nobody has fetched yet.",
            lambda: futures.bytes_held,
        ),
    )
    for name, help_text, value in gauges:
        metrics.watch(name=name, help_text=help_text, value=value)
