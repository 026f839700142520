"""A disk that is full at publish: the old version goes on serving, and the run says why."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.data import largest_difference, logprobs, sequences, train
from support.models import TIED
from support.refusal import TIMEOUT, refusal
from support.sampling import prompt_logprobs
from support.stacks import TestStack, running


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A data directory whose `weights` lie on a disk of their own, of 4 MiB."""
    weights = tmp_path / "data" / "weights"
    weights.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tandem-test", str(weights)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("a small disk can be made only where mounting is allowed")
    yield weights.parent
    subprocess.run(["umount", "--lazy", str(weights)], check=True)


def fill(path: Path) -> None:
    """Writes until the disk has no byte left."""
    with path.open("wb") as file:
        try:
            while True:
                os.write(file.fileno(), b"\0" * 4096)
        except OSError:
            return


def test_a_publish_on_a_full_disk_fails_and_the_old_version_goes_on_serving(
    models: dict[str, Path], small_disk: Path
) -> None:
    settings = {"min_free_bytes": "0"}
    with (
        running(small_disk, models=models, settings=settings) as stack,
        stack.service() as service,
    ):
        run = service.create_lora_training_client(f"{TIED}:full").result(timeout=240)
        tokens = sequences(3, seed=201)
        train(run, seed=202)
        old = run.save_weights_and_get_sampling_client().result(timeout=120)
        then = logprobs(run, tokens)
        train(run, seed=203)
        now = logprobs(run, tokens)
        filler = small_disk / "weights" / "filler"
        fill(filler)

        refused = refusal(
            lambda: run.save_weights_and_get_sampling_client().result(timeout=TIMEOUT)
        )
        assert (refused.type, refused.category) == ("storage_full", "server"), refused
        assert largest_difference(then, prompt_logprobs(old, tokens)) < 1e-4
        assert largest_difference(now, logprobs(run, tokens)) == 0, "the run lives on"
        assert left_over(stack) == []

        filler.unlink()
        new = run.save_weights_and_get_sampling_client().result(timeout=120)
        assert largest_difference(now, prompt_logprobs(new, tokens)) < 1e-4
        assert largest_difference(then, prompt_logprobs(old, tokens)) < 1e-4


def left_over(stack: TestStack) -> list[Path]:
    return list((stack.data_dir / "weights").glob("*/.partial-*"))
