"""`tandem_rollouts_dropped_total` counts datums that a trainer left out, and clients' reports."""

from __future__ import annotations

import re

import pytest

from tests.support.gateway.fake_trainer import FakeTrainer
from tests.support.gateway.runs import Run, train


def dropped(gate) -> dict[str, float]:
    """The counter by reason, without zeros, as a scrape sees it."""
    with gate.http() as client:
        text = client.get("/metrics").text
    found = re.findall(r'tandem_rollouts_dropped_total\{reason="(\w+)"\} (\S+)', text)
    assert {"stale", "timeout", "other"} <= dict(found).keys(), "they are there before they rise"
    return {reason: float(value) for reason, value in found if float(value)}


def rise(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    rises = {reason: after[reason] - before.get(reason, 0) for reason in after}
    return {reason: value for reason, value in rises.items() if value}


def report(gate, run: Run, step: int, **values: float | str) -> None:
    rows = [{"step": step, "values": {f"dropped/{name}": value for name, value in values.items()}}]
    with gate.http() as client:
        where = f"/api/tandem/v1/runs/{run.id}/metrics"
        client.post(where, json={"rows": rows}).raise_for_status()


def test_the_datums_that_a_trainer_leaves_out_are_counted_once(gate, monkeypatch):
    compute = FakeTrainer.ForwardBackward

    async def leaves_out(self, request, context):
        reply = await compute(self, request, context)
        reply.dropped_stale = 3
        return reply

    monkeypatch.setattr(FakeTrainer, "ForwardBackward", leaves_out)
    run, before = Run.new(gate), dropped(gate)
    train(run, 1)
    assert rise(before, dropped(gate)) == {"stale": 3}
    run.backward(1)  # the client repeats it
    run.outcome(1)
    assert rise(before, dropped(gate)) == {"stale": 3}


def test_a_clients_reports_count_by_their_rise(gate):
    run, before = Run.new(gate), dropped(gate)
    report(gate, run, 1, timeout=2, reward=1)
    report(gate, run, 2, timeout=5, reward=1)
    assert rise(before, dropped(gate)) == {"timeout": 5, "reward": 1}
    report(gate, run, 3, timeout=1)  # a loop that begins again
    report(gate, run, 4, timeout=2)
    assert rise(before, dropped(gate)) == {"timeout": 6, "reward": 1}


@pytest.mark.parametrize("value", ["NaN", "Infinity"])
def test_odd_reports_count_nothing_and_unknown_reasons_share_a_label(gate, value):
    run, before = Run.new(gate), dropped(gate)
    report(gate, run, 1, timeout=value, mine=2, yours=3)
    report(gate, run, 2, timeout=4)
    assert rise(before, dropped(gate)) == {"other": 5}
