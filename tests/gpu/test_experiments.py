from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from importlib.util import find_spec

import pytest
import torch

from tandem.agent.host import accelerators
from tests.chaos.experiments import TIMEOUT, Experiment
from tests.support.stacks import TIED, TestStack, running, write_qwen

STEPS = 4

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(len(accelerators()) != 1, reason="needs one NVIDIA GPU, and no more"),
    pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM"),
    pytest.mark.timeout(900),
]


def work_at_once(stack: TestStack, experiments: Sequence[Experiment]) -> None:
    def work(experiment: Experiment) -> None:
        with stack.service() as service:
            experiment.run(service, exactly=STEPS)

    threads = [threading.Thread(target=work, args=(e,), daemon=True) for e in experiments]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT)
    for each in experiments:
        assert each.fault is None, each.fault
        assert len(each.steps) == STEPS


def test_two_experiments_on_one_gpu_compute_what_each_computes_alone(tmp_path):
    """They take turns, and leave nothing on it. In float32."""
    model = write_qwen(tmp_path / "tied", seed=3)
    free = torch.cuda.mem_get_info()[0]
    group = {"name": "gpu", "devices": ["cuda:0"], "roles": ["trainer", "sampler"], "awake": 1}
    settings = {"sharing_quantum": "0.5", "groups": json.dumps([group])}
    with running(tmp_path / "data", models={TIED: model}, settings=settings) as stack:
        experiments = [Experiment("rl"), Experiment("rl-full")]
        work_at_once(stack, experiments)
        with stack.stack.client() as client:
            (shown,) = client.get("groups").raise_for_status().json()["groups"]
        assert shown["switches"] >= len(experiments)
        assert stack.reasons_of_ends() == {"it was released"}, "each worker slept in its turn"
    assert free - torch.cuda.mem_get_info()[0] < 256 * 2**20
    with running(tmp_path / "alone", models={TIED: model}, settings=settings) as stack:
        for found in experiments:
            alone = Experiment(found.kind)
            work_at_once(stack, [alone])
            assert found.steps == alone.steps, found.kind
            assert found.weights == alone.weights, found.kind
