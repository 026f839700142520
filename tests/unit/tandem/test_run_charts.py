from __future__ import annotations

import pytest

from tandem.cli.run_charts import bar_chart, overlay_chart
from tandem.cli.run_values import full_name
from tandem.errors import UserError


@pytest.mark.parametrize("values", [(-1.016e-09, 3.387e-10), (-1.234e-100, 0.0), (1.0, 2.0)])
def test_the_bars_of_a_chart_begin_in_one_column_however_long_the_numbers_are(values):
    assert len({line.index("│") for line in bar_chart(values).splitlines()}) == 1


def test_a_diverged_metric_still_has_a_chart():
    huge = [1.7e308, -1.7e308] * 200
    assert "1.7e+308" in bar_chart(huge[:2])
    assert "│" in bar_chart(huge)
    assert "A" in overlay_chart([list(enumerate(huge))])


def test_a_metric_may_come_later_to_a_follower():
    assert full_name("reward", {}, later=True) == "reward"
    assert full_name("kl_mean", {"tandem/kl_mean": 0.1}, later=True) == "tandem/kl_mean"
    with pytest.raises(UserError, match="none yet"):
        full_name("reward", {})
