from __future__ import annotations

import pytest

from tests.chaos.chaos import run_chaos


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_experiments_come_out_the_same_whatever_is_killed_meanwhile(tmp_path):
    run_chaos(tmp_path, faults=10, seed=1)
