"""The gateway's metrics of optimizer steps."""

from __future__ import annotations

import math

from gateway.metrics import Metrics


def test_a_step_counts_its_seconds_staleness_and_gap():
    metrics = Metrics()
    numbers = {"seconds/queue": 2.0, "seconds/step": 5.0, "staleness": 1.0, "gap_mean": 0.2}
    metrics.note_step({**numbers, "gap_max": math.inf, "loss": 3.0})
    metrics.note_step({"seconds/queue": 1.0, "loss": math.nan})

    def value(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(f"tandem_gateway_{name}", labels)

    assert value("steps_total") == 2
    assert value("step_seconds_total", share="queue") == 3
    assert value("step_seconds_total", share="step") is None, "the shares already add up to it"
    assert value("staleness_steps_sum") == 1
    assert value("logprob_gap_sum", statistic="mean") == 0.2
    assert value("logprob_gap_count", statistic="max") is None


def test_a_counter_of_an_alert_exists_before_its_first_event():
    metrics = Metrics()
    for kind in ("trainer", "sampler"):
        found = metrics.registry.get_sample_value(
            "tandem_gateway_worker_exits_total", {"kind": kind}
        )
        assert found == 0
