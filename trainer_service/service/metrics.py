from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from tandem.v1 import trainer_pb2
from trainer_service.service.sequence import Reply

_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class TrainerMetrics:
    """Outcomes are "ok" and "failure"."""

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
        self.runs = Gauge("tandem_trainer_runs", "Runs hosted.", registry=registry)
        self.steps = Gauge(
            "tandem_trainer_step",
            "Optimizer steps applied, to the run that was served last.",
            registry=registry,
        )
        self.published = Counter(
            "tandem_trainer_published_bytes", "Bytes written of weight versions.", registry=registry
        )
        self.micro_batch_tokens = Gauge(
            "tandem_trainer_micro_batch_tokens",
            "Tokens of a micro-batch at most; fewer once memory ran out.",
            registry=registry,
        )
        self.waiting = Gauge(
            "tandem_trainer_waiting_operations",
            "Operations received and not yet answered.",
            registry=registry,
        )

    def record(self, kind: str, reply: Reply, seconds: float) -> None:
        outcome = "failure" if reply.HasField("failure") else "ok"
        self.operations.labels(kind, outcome).inc()
        self.seconds.labels(kind).observe(seconds)
        match reply:
            case trainer_pb2.ForwardBackwardReply():
                self.tokens.inc(reply.tokens)
                if reply.micro_batch_tokens:
                    self.micro_batch_tokens.set(reply.micro_batch_tokens)
            case trainer_pb2.PublishReply():
                self.published.inc(reply.bytes)
            case trainer_pb2.OptimStepReply() | trainer_pb2.LoadCheckpointReply():
                self.steps.set(reply.step)
