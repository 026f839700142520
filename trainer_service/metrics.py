"""The trainer's metrics, prefix `tandem_trainer_`."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class TrainerMetrics:
    """Operations are labelled by their kind, and by outcome: ok, user or server."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.operations = Counter(
            "tandem_trainer_operations",
            "Operations applied.",
            ["operation", "outcome"],
            registry=registry,
        )
        self.seconds = Histogram(
            "tandem_trainer_operation_seconds",
            "Time to apply an operation, without the wait for its turn.",
            ["operation"],
            buckets=_BUCKETS,
            registry=registry,
        )
        self.tokens = Counter("tandem_trainer_tokens", "Tokens computed.", registry=registry)
        self.steps = Gauge("tandem_trainer_step", "Optimizer steps applied.", registry=registry)
        self.published = Counter(
            "tandem_trainer_published_bytes", "Bytes of weight versions.", registry=registry
        )
        self.waiting = Gauge(
            "tandem_trainer_waiting_operations",
            "Operations received and not yet answered.",
            registry=registry,
        )
