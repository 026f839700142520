"""A compiled run, for `make nightly`: compiling takes minutes."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest

from tests.support.sdk import outputs, sequences, supervised, train
from tests.support.stacks import TIED, running, session_of, write_qwen
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(3600)]
PATIENCE = 1500.0
ASKS = {"tandem.compile": "on", "tandem.sampler": "none"}


@pytest.mark.parametrize("name", [f"{TIED}:full", TIED], ids=["all weights", "adapters"])
def test_a_compiled_trainer_that_is_killed_goes_on_to_the_same_bits(
    name: str, tmp_path: Path, monkeypatch
):
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)  # torch sets it when it compiles
    model, tokens = write_qwen(tmp_path / "model", seed=3), sequences(6, seed=1)
    found = []
    with running(tmp_path, models={TIED: model}) as stack:
        for killed in (False, True):
            with stack.service(user_metadata=ASKS) as service:
                run = service.create_lora_training_client(name, rank=8, seed=4).result(PATIENCE)
                train(run, seed=7, steps=2)
                if killed:
                    worker = stack.worker("trainer", session_id=session_of(run))
                    os.kill(worker["pid"], signal.SIGKILL)
                    wait_until(lambda run=run: stack.run(run)["restored"] == 1, timeout=PATIENCE)
                train(run, seed=8, steps=2)
                data = [supervised(each) for each in tokens]
                found.append(outputs(run.forward(data, "cross_entropy").result(timeout=PATIENCE)))
        assert any((stack.data_dir / "compiled").iterdir())
    undisturbed, restored = found
    for one, other in zip(undisturbed, restored, strict=True):
        np.testing.assert_array_equal(one, other)
