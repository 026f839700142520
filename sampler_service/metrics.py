"""The sampler's Prometheus metrics, `tandem_sampler_*`."""

from __future__ import annotations

from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from sampler_service.engine import EngineResult, EngineState
from sampler_service.lifecycle import SwitchReport
from sampler_service.weights.loader import LoadableVersion, LoadOutcome

_SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


class SamplerMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        counter = partial(Counter, registry=registry)
        gauge = partial(Gauge, registry=registry)
        histogram = partial(Histogram, registry=registry, buckets=_SECONDS)
        self._requests = counter(
            "tandem_sampler_requests_total", "Sample requests, by outcome.", ["outcome"]
        )
        tokens = counter("tandem_sampler_tokens_total", "Tokens of answered requests.", ["kind"])
        self._prompt, self._cached, self._computed, self._sampled = (
            tokens.labels(kind)
            for kind in ("prompt", "prompt_cached", "prompt_computed", "sampled")
        )
        self._request_seconds = histogram(
            "tandem_sampler_request_seconds", "From a request's arrival to its answer."
        )
        self._engine_seconds = counter(
            "tandem_sampler_engine_seconds_total", "Time spent in the engine's steps."
        )
        self._running = gauge("tandem_sampler_running", "Requests in the engine.")
        self._waiting = gauge("tandem_sampler_waiting", "Requests and loads in the queue.")
        self._load_seconds = histogram(
            "tandem_sampler_load_seconds", "Successful loads of full weights."
        )
        self._carried_over = counter(
            "tandem_sampler_carried_over_total",
            "In-flight requests that continued with newer weights.",
        )
        self._pause_seconds = histogram(
            "tandem_sampler_pause_seconds",
            "The pause of in-flight requests before they continued with newer full weights.",
        )
        self._adapter_seconds = histogram(
            "tandem_sampler_adapter_seconds",
            "Successful loads of adapters, with their canaries.",
        )
        self._load_bytes = counter("tandem_sampler_load_bytes_total", "Bytes of weights loaded.")
        self._handoffs = counter(
            "tandem_sampler_handoffs_total",
            "Handoffs from a trainer's memory: loaded, or read from files instead.",
            ["outcome"],
        )
        self._load_failures = counter("tandem_sampler_load_failures_total", "Loads that failed.")
        self._canary = gauge(
            "tandem_sampler_canary_difference", "Largest logprob difference of the last canary."
        )
        self._step = gauge(
            "tandem_sampler_version_step", "The optimizer step of the loaded weights."
        )
        self._state = gauge(
            "tandem_sampler_state", "1 for the engine's state, 0 for the others.", ["state"]
        )

        self._switch_seconds = histogram(
            "tandem_sampler_switch_seconds", "Sleeps and wakes, by phase.", ["phase"]
        )
        self._switch_bytes = counter(
            "tandem_sampler_switch_bytes_total",
            "Bytes moved off and onto the device by sleeps and wakes.",
        )

    def state(self, state: EngineState) -> None:
        for each in EngineState:
            self._state.labels(each.value).set(each is state)

    def version(self, version: LoadableVersion) -> None:
        self._step.set(version.step)

    def stepped(self, *, seconds: float) -> None:
        self._engine_seconds.inc(seconds)

    def queue(self, *, running: int, waiting: int) -> None:
        self._running.set(running)
        self._waiting.set(waiting)

    def loaded(self, outcome: LoadOutcome) -> None:
        if outcome.version.adapter:
            self._adapter_seconds.observe(outcome.seconds)
        else:
            self._load_seconds.observe(outcome.seconds)
            self.version(outcome.version)
        if outcome.handed_off or outcome.handoff_failure:
            self._handoffs.labels("loaded" if outcome.handed_off else "files").inc()
        self._load_bytes.inc(outcome.bytes)
        self._canary.set(outcome.canary_difference)

    def carried_over(self, requests: int, outcome: LoadOutcome) -> None:
        self._carried_over.inc(requests)
        if not outcome.version.adapter:
            self._pause_seconds.observe(outcome.seconds)

    def load_failed(self) -> None:
        self._load_failures.inc()

    def switched(self, switch: SwitchReport) -> None:
        for phase, seconds in switch.phases.items():
            self._switch_seconds.labels(phase).observe(seconds)
        self._switch_bytes.inc(switch.bytes_moved)

    def answered(self, result: EngineResult, *, prompt_tokens: int, seconds: float) -> int:
        """Count an answered request. Returns its sampled tokens."""
        sampled = sum(len(sample.tokens) for sample in result.samples)
        self._requests.labels("ok").inc()
        self._prompt.inc(prompt_tokens)
        self._cached.inc(result.cached_tokens)
        self._computed.inc(result.computed_tokens)
        self._sampled.inc(sampled)
        self._request_seconds.observe(seconds)
        return sampled

    def refused(self, error_type: str) -> None:
        self._requests.labels(error_type).inc()
