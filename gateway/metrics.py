"""The gateway's metrics. Labels are routes, kinds and states, all bounded in number."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
"""Seconds."""
_STEPS = (0, 1, 2, 3, 5, 8, 16, 32, 64)
DROP_REASONS = (
    *("stale", "timeout", "sample", "environment", "reward"),
    *("incomplete", "no_signal", "given_up"),
)
"""Reasons of dropped rollouts, as `tandem.rl` reports them."""
_NATS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10)

GROUP_GAUGES = {
    "lease_holders": "Workers that have the devices of a group, or move on to them or off them.",
    "lease_waiters": "Workers that wait for the devices of a group.",
    "resident_bytes": "Bytes of the workers of a group on its devices, as of their last switches.",
    "sleeping_bytes": "Bytes of the workers of a group on the host, as of their last switches.",
    "sleeping_disk_bytes": "Bytes of the workers of a group that are in files while they sleep.",
}

GroupValues = Callable[[], Mapping[str, Mapping[str, float]]]
"""Returns the values of `GROUP_GAUGES`, by group."""


class _GroupGauges(Collector):
    def __init__(self, values: GroupValues) -> None:
        self._values = values

    def collect(self) -> Iterator[GaugeMetricFamily]:
        values = self._values()
        for name, text in GROUP_GAUGES.items():
            gauge = GaugeMetricFamily(f"tandem_gateway_{name}", text, labels=["group"])
            for group, of_group in values.items():
                gauge.add_metric([group], of_group[name])
            yield gauge


class Metrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.requests = self._counter("requests", "HTTP requests answered.", "route", "status")
        self.request_seconds = self._histogram(
            "request_seconds",
            "Time until an HTTP request was answered; long polls include their wait.",
            "route",
        )
        self.event_loop_lag = self._histogram(
            "event_loop_lag_seconds",
            "How much later than asked for the event loop called, four times a second.",
        )
        self.operations = self._counter("operations", "Operations that ended.", "kind", "outcome")
        self.operation_seconds = self._histogram(
            "operation_seconds", "Time from the acceptance of an operation to its end.", "kind"
        )
        self.samples = self._counter("samples", "Sample requests that ended.", "outcome")
        self.sampled_tokens = self._counter("sampled_tokens", "Tokens that samplers produced.")
        self.worker_exits = self._counter(
            "worker_exits", "Workers that ended by themselves.", "kind"
        )
        self.restorations = self._counter(
            "trainer_restorations", "Trainers that died, by whether they were restored.", "outcome"
        )
        # An alert notices only the rise of a counter that was there before.
        for kind in ("trainer", "sampler"):
            self.worker_exits.labels(kind)
        for outcome in ("taken_up", "restored", "given_up"):
            self.restorations.labels(outcome)
        self.snapshots = self._counter("snapshots", "Snapshots that were asked for.", "outcome")
        self.telemetry_events = self._counter(
            "telemetry_events", "Telemetry events that clients sent; they are not stored."
        )
        self.refused_keys = self._counter(
            "refused_keys", "Requests whose key or token was refused.", "reason"
        )
        self.malformed_requests = self._counter(
            "malformed_requests", "Requests that are not HTTP/1.1, or ask for another.", "reason"
        )
        self.refusals = self._counter("refusals", "Requests refused by a limit.", "limit")
        self.timeouts = self._counter(
            "timeouts", "Requests and connections ended because something took too long.", "what"
        )
        self.spilled_bytes = self._counter(
            "spilled_bytes", "Bytes of sample results that were moved from memory to disk."
        )
        self.results_given_up = self._counter(
            "results_given_up",
            "Sample results dropped because their owner had too many that nobody fetched.",
        )
        self.published_bytes = self._counter(
            "published_bytes",
            "Bytes written of published weight versions.",
        )

        self.steps = self._counter("steps", "Optimizer steps of all runs.")
        self.step_seconds = self._counter(
            "step_seconds", "Wall time of optimizer steps, by where it went.", "share"
        )
        self.staleness = self._histogram(
            "staleness_steps",
            "How many steps a step's samples were behind the trainer, on average.",
            buckets=_STEPS,
        )
        self.logprob_gap = self._histogram(
            "logprob_gap",
            "Distance of the sampler's logprobs from the trainer's: a step's mean and maximum.",
            "statistic",
            buckets=_NATS,
        )
        self.record_rows = self._counter(
            "record_rows", "Rows of runs' records that clients sent and that are kept.", "kind"
        )
        self.record_dropped = self._counter(
            "record_dropped", "Rows that were dropped: too large, too many, or no room.", "kind"
        )
        for kind in ("metrics", "rollouts"):
            self.record_rows.labels(kind)
            self.record_dropped.labels(kind)
        self.rollouts_dropped = Counter(
            "tandem_rollouts_dropped_total",
            "Rollouts and groups that were not trained: left out by a trainer, or by the client, "
            "which reports them as dropped/REASON.",
            ["reason"],
            registry=self.registry,
        )
        for reason in (*DROP_REASONS, "other"):
            self.rollouts_dropped.labels(reason)
        self.worker_seconds = self._counter(
            "worker_seconds", "Seconds that workers waited, started and ran.", "kind", "state"
        )
        self.free_disk = Gauge(
            "tandem_gateway_free_disk_bytes",
            "Free bytes of the data directory's disk.",
            registry=self.registry,
        )

        self.lease_wait_seconds = self._histogram(
            "lease_wait_seconds", "Time that a worker waited for its devices.", "group"
        )
        self.lease_hold_seconds = self._histogram(
            "lease_hold_seconds", "Time that a worker had its devices, its sleep included.", "group"
        )
        self.switch_seconds = self._histogram(
            "switch_seconds",
            "Time that a worker took to sleep or to wake.",
            "group",
            "kind",
            "direction",
        )
        self.moved_bytes = self._counter(
            "moved_bytes", "Bytes that workers moved to sleep or to wake.", "group", "direction"
        )
        self.sleeps_refused = self._counter(
            "sleeps_refused", "Times that a worker stayed awake for lack of room.", "group"
        )

    def note_step(self, numbers: Mapping[str, float]) -> None:
        """Count an optimizer step by its numbers, such as `seconds/queue` and `gap_mean`."""
        self.steps.inc()
        known = {name: value for name, value in numbers.items() if math.isfinite(value)}
        for name, value in known.items():
            kind, _, share = name.partition("/")
            if kind == "seconds" and share != "step":
                self.step_seconds.labels(share).inc(value)
        if "staleness" in known:
            self.staleness.observe(known["staleness"])
        for statistic in ("mean", "max"):
            if (gap := known.get(f"gap_{statistic}")) is not None:
                self.logprob_gap.labels(statistic).observe(gap)

    def note_dropped(
        self, before: Mapping[str, float | str], after: Mapping[str, float | str]
    ) -> None:
        """Count the rise of a run's values `dropped/REASON`, which count since its start."""
        for name, value in after.items():
            kind, _, reason = name.partition("/")
            known = before.get(name, 0.0)
            if kind == "dropped" and not isinstance(value, str) and not isinstance(known, str):
                label = reason if reason in DROP_REASONS else "other"
                self.rollouts_dropped.labels(label).inc(max(0.0, value - known))

    def watch_groups(self, values: GroupValues) -> None:
        """Compute the `GROUP_GAUGES` of all groups at each scrape."""
        self.registry.register(_GroupGauges(values))

    def watch(self, name: str, help_text: str, value: Callable[[], float]) -> None:
        """Register a gauge that is computed at each scrape."""
        gauge = Gauge(f"tandem_gateway_{name}", help_text, registry=self.registry)
        gauge.set_function(value)

    def _counter(self, name: str, help_text: str, *labels: str) -> Counter:
        return Counter(f"tandem_gateway_{name}_total", help_text, labels, registry=self.registry)

    def _histogram(
        self, name: str, help_text: str, *labels: str, buckets: Sequence[float] = _BUCKETS
    ) -> Histogram:
        return Histogram(
            f"tandem_gateway_{name}", help_text, labels, buckets=buckets, registry=self.registry
        )
