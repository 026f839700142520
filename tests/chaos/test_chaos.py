from __future__ import annotations

import pytest

from tests.chaos.chaos import run_chaos

pytestmark = pytest.mark.nightly


@pytest.mark.filterwarnings("ignore:DEPRECATED")  # load_state is deprecated, but part of the SDK
@pytest.mark.timeout(1200)
def test_experiments_come_out_the_same_whatever_happens_meanwhile(tmp_path):
    run_chaos(tmp_path, faults=10, seed=6, kinds=("full", "rl"))


@pytest.mark.filterwarnings("ignore:DEPRECATED")
@pytest.mark.timeout(5400)
@pytest.mark.parametrize("ranks", [1, 2])
def test_so_they_do_on_several_ranks_and_after_many_faults(ranks, tmp_path):
    run_chaos(tmp_path, faults=40, seed=2, ranks=ranks, kinds=("lora", "rl-full"))
