"""Two trainer backends in a session, one from an installed package."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest
from tinker import ServiceClient, TrainingClient

from tests.support.other_packages import PLAIN_BACKEND, install
from tests.support.sdk import SOON, adam, supervised
from tests.support.stacks import TIED, TestStack, running

pytestmark = pytest.mark.slow

DATA = [supervised([5 + place for place in range(length)]) for length in (3, 9, 6)]


@pytest.fixture
def stack(models, tmp_path, monkeypatch):
    installed = install(PLAIN_BACKEND, tmp_path)
    path = f"{installed}:{Path.cwd()}:{os.environ.get('PYTHONPATH', '')}"
    monkeypatch.setenv("PYTHONPATH", path)
    with running(tmp_path / "data", models=models) as stack:
        yield stack


def create(sdk: ServiceClient, backend: str) -> TrainingClient:
    asked = {"tandem.backend": backend, "tandem.sampler": "none"}
    made = sdk.create_lora_training_client(f"{TIED}:full", user_metadata=asked)
    return made.result(timeout=240)


def losses(run: TrainingClient, steps: int) -> list[float]:
    found = []
    for _ in range(steps):
        output = run.forward_backward(DATA, "cross_entropy")
        run.optim_step(adam()).result(timeout=240)  # a trainer may have to start
        found.append(output.result(timeout=SOON).metrics["loss:sum"])
    return found


def trainer_of(stack: TestStack, run: TrainingClient) -> dict:
    workers = [worker for worker in stack.status()["workers"] if worker["kind"] == "trainer"]
    return next(worker for worker in workers if worker["run_id"] == run.model_id)


def plain_models_loaded(stack: TestStack) -> int:
    logs = (path.read_text() for path in (stack.data_dir / "logs").glob("*.log"))
    return sum(log.count('"event":"plain_model_loaded"') for log in logs)


def test_a_run_trains_with_the_backend_that_it_names_and_is_restored_with_it(stack):
    with stack.service() as sdk:
        plain, usual = create(sdk, "plain"), create(sdk, "fsdp2")
        assert plain_models_loaded(stack) == 1
        np.testing.assert_allclose(losses(plain, 2), losses(usual, 2), rtol=1e-4)
        os.kill(trainer_of(stack, plain)["pid"], signal.SIGKILL)
        np.testing.assert_allclose(losses(plain, 2), losses(usual, 2), rtol=1e-4)
        assert stack.run(plain)["restored"] == 1
        assert plain_models_loaded(stack) == 2
        for run in (plain, usual):
            run.save_weights_for_sampler("end").result(timeout=SOON)
        found, expected = stack.published(plain), stack.published(usual)
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            np.testing.assert_allclose(found[name], tensor, atol=2e-4, err_msg=name)
        with pytest.raises(Exception, match="'plane', which is no trainer backend"):
            create(sdk, "plane")
