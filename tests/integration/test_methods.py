"""SFT, DPO, KTO and GRPO learn with both backends, and fail with their gradients flipped.

`make bench-methods` writes the same as a table."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.methods import BACKENDS, METHODS, SEEDS, Trainings, trainings
from tests.support.trl_jobs import needs_trl

pytestmark = [needs_trl, pytest.mark.nightly, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainings]:
    with trainings(tmp_path_factory.mktemp("methods")) as opened:
        yield opened


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_thirty_steps_teach(opened: Trainings, backend: str, method: str) -> None:
    for seed in SEEDS:
        outcome = opened.run(backend, method, seed)
        print(f"seed {seed}: {outcome.first:.3f} to {outcome.last:.3f}")
        assert outcome.has_learned


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_flipped_gradients_do_not_teach(opened: Trainings, backend: str, method: str) -> None:
    outcome = opened.run(backend, method, 0, flipped=True)
    print(f"{outcome.first:.3f} to {outcome.last:.3f}")
    assert not outcome.has_learned
