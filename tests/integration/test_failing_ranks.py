"""The client's error when a rank raises in Python."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tinker import RequestFailedError

from tests.support import failing_ranks
from tests.support.sdk import TIMEOUT, adam, supervised
from tests.support.stacks import TIED, running

pytestmark = pytest.mark.slow

BATCH = [supervised([7, 8, 9]), supervised([4, 5, 6])]


@pytest.mark.parametrize(
    ("backend", "sentence"),
    [
        ("fails_in_forward", "rank 1 failed: AssertionError .traceback: .*_look_up.* KeyError"),
        pytest.param(
            "fails_in_step",
            "rank 1 failed: ZeroDivisionError: no gradients in .config.json",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_a_client_hears_of_a_defect_in_a_rank_at_once_and_no_trainer_repeats_it(
    models, tmp_path: Path, monkeypatch, backend, sentence
):
    failing_ranks.install(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path.cwd()}:{os.environ.get('PYTHONPATH', '')}")
    settings = {"trainer_ranks": "2", "trainer_backend": backend}
    with (
        running(tmp_path / "stack", models=models, settings=settings) as stack,
        stack.service() as sdk,
    ):
        run = sdk.create_lora_training_client(f"{TIED}:full").result(timeout=240)
        pending = [run.forward_backward(BATCH, "cross_entropy"), run.optim_step(adam())]
        with pytest.raises(RequestFailedError, match=f"worker_died: {sentence}"):
            for each in pending:
                each.result(timeout=TIMEOUT)
        assert stack.run(run)["restored"] == 0
