from __future__ import annotations

import json
from importlib.util import find_spec

import pytest
import torch

from tandem.agent.host import accelerators
from tests.chaos.experiments import Experiment, begin, end
from tests.support.stacks import TIED, running, write_qwen

STEPS = 4

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(len(accelerators()) != 1, reason="needs one NVIDIA GPU, and no more"),
    pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM"),
    pytest.mark.timeout(900),
]


def test_two_experiments_on_one_gpu_compute_what_each_computes_alone(tmp_path):
    """They take turns, and leave nothing on it. In float32."""
    model = write_qwen(tmp_path / "tied", seed=3)
    free = torch.cuda.mem_get_info()[0]
    group = {"name": "gpu", "devices": ["cuda:0"], "roles": ["trainer", "sampler"], "awake": 1}
    settings = {"sharing_quantum": "0.5", "groups": json.dumps([group])}
    with running(tmp_path / "data", models={TIED: model}, settings=settings) as stack:
        experiments = [Experiment("rl"), Experiment("rl-full")]
        end(begin(stack, experiments, steps=STEPS), experiments, steps=STEPS)
        with stack.stack.client() as client:
            (shown,) = client.get("groups").raise_for_status().json()["groups"]
        assert shown["switches"] >= len(experiments)
        assert stack.reasons_of_ends() == {"it was released"}, "each worker slept in its turn"
    assert free - torch.cuda.mem_get_info()[0] < 256 * 2**20
    with running(tmp_path / "alone", models={TIED: model}, settings=settings) as stack:
        for found in experiments:
            alone = Experiment(found.kind)
            end(begin(stack, [alone], steps=STEPS), [alone], steps=STEPS)
            assert found.steps == alone.steps, found.kind
            assert found.weights == alone.weights, found.kind
