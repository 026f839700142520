"""The metrics of the gateway. Labels are routes, kinds and states, which are all bounded."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class Metrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "tandem_gateway_requests_total",
            "HTTP requests answered.",
            ["route", "status"],
            registry=self.registry,
        )
        self.request_seconds = Histogram(
            "tandem_gateway_request_seconds",
            "Time until an HTTP request was answered; long polls include their wait.",
            ["route"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.operations = Counter(
            "tandem_gateway_operations_total",
            "Operations that ended.",
            ["kind", "outcome"],
            registry=self.registry,
        )
        self.operation_seconds = Histogram(
            "tandem_gateway_operation_seconds",
            "Time from the acceptance of an operation to its end.",
            ["kind"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.samples = Counter(
            "tandem_gateway_samples_total",
            "Sample requests that ended.",
            ["outcome"],
            registry=self.registry,
        )
        self.sampled_tokens = Counter(
            "tandem_gateway_sampled_tokens_total",
            "Tokens that samplers produced.",
            registry=self.registry,
        )
        self.worker_exits = Counter(
            "tandem_gateway_worker_exits_total",
            "Workers that ended by themselves.",
            ["kind"],
            registry=self.registry,
        )
        self.telemetry_events = Counter(
            "tandem_gateway_telemetry_events_total",
            "Telemetry events that clients sent; they are not stored.",
            registry=self.registry,
        )
        self.refused_keys = Counter(
            "tandem_gateway_refused_keys_total",
            "Requests whose key or token was refused.",
            ["reason"],
            registry=self.registry,
        )
        self.refusals = Counter(
            "tandem_gateway_refusals_total",
            "Requests refused by a limit.",
            ["limit"],
            registry=self.registry,
        )
        self.timeouts = Counter(
            "tandem_gateway_timeouts_total",
            "Requests and connections ended because something took too long.",
            ["what"],
            registry=self.registry,
        )
        self.spilled_bytes = Counter(
            "tandem_gateway_spilled_bytes_total",
            "Bytes of sample results that were moved from memory to disk.",
            registry=self.registry,
        )
        self.results_given_up = Counter(
            "tandem_gateway_results_given_up_total",
            "Sample results dropped because their owner had too many that nobody fetched.",
            registry=self.registry,
        )
        self.published_bytes = Counter(
            "tandem_gateway_published_bytes_total",
            "Bytes of published weight versions.",
            registry=self.registry,
        )

    def watch(self, *, name: str, help_text: str, value: Callable[[], float]) -> None:
        """Register a gauge whose value is computed at each scrape."""
        gauge = Gauge(f"tandem_gateway_{name}", help_text, registry=self.registry)
        gauge.set_function(value)
