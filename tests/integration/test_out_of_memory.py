"""Running out of memory only causes a pause, also if the trainer is killed later."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest
from tinker import TrainingClient

from tests.support import small_memory
from tests.support.sdk import TIMEOUT, adam, supervised
from tests.support.stacks import TIED, TestStack, running, session_of

pytestmark = pytest.mark.nightly

EARLY = [supervised([7, 8, 9]), supervised([4, 5])]
LATE = [supervised(list(range(5 + number, 13 + number))) for number in range(8)]
"""28 tokens for each of two ranks."""


def trained(stack: TestStack, run: TrainingClient, *, name: str) -> dict[str, np.ndarray]:
    """Weights after a step with gradients of two batches."""
    pending = [
        run.forward_backward(EARLY, "cross_entropy"),
        run.forward_backward(LATE, "cross_entropy"),
        run.optim_step(adam()),
    ]
    for each in pending:
        each.result(timeout=240)  # a trainer may have to start
    run.save_weights_for_sampler(name).result(timeout=TIMEOUT)
    return stack.published(run)


@pytest.fixture
def undisturbed(models, tmp_path) -> list[dict[str, np.ndarray]]:
    """Weights of two ranks with memory for 14 tokens."""
    settings = {"trainer_ranks": "2", "trainer_micro_batch_tokens": "14"}
    with running(tmp_path / "1", models=models, settings=settings) as stack, stack.service() as sdk:
        run = sdk.create_lora_training_client(f"{TIED}:full").result(timeout=240)
        return [trained(stack, run, name=name) for name in ("one", "two")]


def test_a_run_learns_the_same_on_a_rank_with_little_memory(
    models, tmp_path: Path, monkeypatch, undisturbed
):
    small_memory.install(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path.cwd()}:{os.environ.get('PYTHONPATH', '')}")
    settings = {"trainer_ranks": "2", "trainer_backend": "small_memory_1"}
    with running(tmp_path / "2", models=models, settings=settings) as stack, stack.service() as sdk:
        run = sdk.create_lora_training_client(f"{TIED}:full").result(timeout=240)
        found = [trained(stack, run, name="one")]
        status = stack.run(run)
        assert (status["restored"], status["micro_batch_tokens"]) == (1, 14)
        worker = stack.worker("trainer", session_id=session_of(run))
        os.kill(worker["pid"], signal.SIGKILL)
        found.append(trained(stack, run, name="two"))
        assert (stack.run(run)["restored"], stack.run(run)["micro_batch_tokens"]) == (2, 14)
    for step, expected in zip(found, undisturbed, strict=True):
        assert step.keys() == expected.keys()
        for name, tensor in expected.items():
            np.testing.assert_array_equal(step[name], tensor, err_msg=name)
