"""Many LoRA runs of one base model share trainers by default."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import tinker
from tinker import types

from tandem.settings.sharing import MOST_RUNS
from tests.support.stacks import TIED, running, write_qwen

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600)]

RUNS, SOON = 100, 300
TOKENS = [3, 5, 7, 11]
BATCH = [
    types.Datum(
        model_input=types.ModelInput.from_ints(TOKENS[:-1]),
        loss_fn_inputs={"target_tokens": TOKENS[1:], "weights": [1.0] * 3},
    )
]


def step(service: tinker.ServiceClient) -> float:
    run = service.create_lora_training_client(TIED, rank=8).result(timeout=SOON)
    batch = run.forward_backward(BATCH, "cross_entropy")
    run.optim_step(types.AdamParams(learning_rate=1e-3)).result(timeout=SOON)
    return batch.result(timeout=SOON).metrics["loss:sum"]


def test_a_hundred_runs_of_one_owner_make_their_steps_within_8_gib(tmp_path):
    models = {TIED: write_qwen(tmp_path / "tied", seed=3)}
    with running(tmp_path / "data", models=models) as stack, stack.service() as service:
        with ThreadPoolExecutor(RUNS) as threads:
            losses = list(threads.map(step, [service] * RUNS))
        assert len(losses) == RUNS and max(losses) - min(losses) < 1e-4
        trainers = [each for each in stack.status()["workers"] if each["kind"] == "trainer"]
        assert len(trainers) <= RUNS // MOST_RUNS + 1
        assert sum(process.resident_bytes for process in stack.processes()) < 8 * 2**30
