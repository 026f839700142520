"""Experiments that share devices in turns come out as they do alone, bit for bit."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from tests.chaos.experiments import TIMEOUT, Experiment
from tests.support.stacks import GROUPS, TIED, TestStack, running, write_qwen

STEPS = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_qwen(tmp_path_factory.mktemp("model") / "tied", seed=3)


def together(stack: TestStack, kinds: Sequence[str]) -> list[Experiment]:
    """Let experiments run at the same time, each in a session of its own."""
    experiments = [Experiment(kind) for kind in kinds]

    def work(experiment: Experiment) -> None:
        with stack.service() as service:
            experiment.run(service, exactly=STEPS)

    threads = [threading.Thread(target=work, args=(each,), daemon=True) for each in experiments]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT)
    for each in experiments:
        assert each.fault is None, each.fault
        assert len(each.steps) == STEPS
    return experiments


@pytest.fixture(scope="module")
def alone(model, tmp_path_factory) -> dict[str, Experiment]:
    """Each kind of experiment on a machine of its own, one after the other."""
    with running(tmp_path_factory.mktemp("alone"), models={TIED: model}) as stack:
        return {kind: together(stack, [kind])[0] for kind in ("rl", "rl-full", "full")}


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("groups", "kinds"),
    [("two", ("rl", "rl-full", "full")), ("one", ("rl", "rl-full"))],
    ids=["three on a core for training and one for sampling", "two on a single core"],
)
def test_time_sliced_equals_alone(groups, kinds, model, alone, tmp_path):
    with running(
        tmp_path,
        models={TIED: model},
        settings={"groups": GROUPS[groups], "sharing_quantum": "0.2"},
    ) as stack:
        for found in together(stack, kinds):
            assert found.steps == alone[found.kind].steps, found.kind
            assert found.weights == alone[found.kind].weights, found.kind
        log = stack.stack.log_path.read_text()
    assert "lease_holder_ended" not in log
