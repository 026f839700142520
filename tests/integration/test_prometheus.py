"""The dashboard and the alerts of `deploy/` on a real stack."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pytest
from tinker import TrainingClient

from tests.support.prometheus import (
    PROGRAM,
    Prometheus,
    alert_values,
    panel_expressions,
    running_prometheus,
)
from tests.support.sdk import TIMEOUT, adam, datum, sample, train
from tests.support.stacks import TestStack
from tests.support.waiting import wait_until

pytestmark = pytest.mark.skipif(not PROGRAM.exists(), reason="Debian's prometheus is not installed")

PROMPT = [7, 8, 9]


def reinforce(run: TrainingClient, *, rate: float = 1e-3, temperature: float = 1.0) -> None:
    """Sample from the run's weights and take one policy step on the answers. The trainer computes
    at temperature 1."""
    sampler = run.save_weights_and_get_sampling_client().result(timeout=TIMEOUT)
    answers = sample(sampler, PROMPT, count=4, tokens=12, temperature=temperature)
    rest = np.zeros(len(PROMPT) - 1, np.float32)
    data = [
        datum(
            [*PROMPT, *answer.tokens],
            logprobs=np.concatenate([rest, np.array(answer.logprobs, np.float32)]),
            advantages=np.concatenate([rest, np.full(len(answer.tokens), sign, np.float32)]),
        )
        for answer, sign in zip(answers, (1, -1, 1, -1), strict=True)
    ]
    run.forward_backward(data, "importance_sampling").result(timeout=TIMEOUT)
    run.optim_step(adam(rate)).result(timeout=TIMEOUT)


def missing(prometheus: Prometheus) -> list[tuple[str, str]]:
    """Return the panels and alerts whose expressions have no series."""
    expressions = [(name, each) for name, of in panel_expressions().items() for each in of]
    expressions += alert_values().items()
    return [(name, each) for name, each in expressions if not prometheus.query(each)]


@pytest.mark.slow
def test_every_expression_of_panels_and_alerts_returns_a_series(
    stack: TestStack, run: TrainingClient, tmp_path
) -> None:
    with running_prometheus(tmp_path, stack.stack.endpoint) as prometheus:
        for _ in range(2):
            reinforce(run)
        with suppress(AssertionError):  # the next line shows the rest
            wait_until(lambda: not missing(prometheus))
        assert missing(prometheus) == []
        kinds = prometheus.query('count by (kind) (up{job=~".*tandem-.*"} == 1)')
        assert {each["metric"]["kind"] for each in kinds} == {
            "gateway",
            "agent",
            "trainer",
            "sampler",
        }


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_wrong_sampling_temperature_fires_the_gap_alert_and_no_learning_does_not(
    stack: TestStack, run: TrainingClient, tmp_path
) -> None:
    train(run, seed=5, steps=60)  # an untrained model's distribution is flat at each temperature
    gap = 'sum(tandem_gateway_logprob_gap_count{statistic="mean"})'
    with running_prometheus(tmp_path, stack.stack.endpoint) as prometheus:

        def steps() -> int:
            found = prometheus.query(gap)
            return int(found[0]["value"][1]) if found else 0

        reinforce(run, rate=0.0)
        before = wait_until(steps)
        for _ in range(100):
            reinforce(run, rate=0.0)
        wait_until(lambda: steps() == before + 100)
        value = prometheus.query(alert_values()["TandemLogprobGap"])
        assert float(value[0]["value"][1]) == 0
        assert "TandemLogprobGap" not in prometheus.alerts()
        for _ in range(8):
            reinforce(run, rate=0.0, temperature=0.5)
        wait_until(lambda: "TandemLogprobGap" in prometheus.alerts())
