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
from tests.support.sdk import TIMEOUT, adam, datum, sample
from tests.support.stacks import TestStack
from tests.support.waiting import wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PROGRAM.exists(), reason="Debian's prometheus is not installed"),
]

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
