from __future__ import annotations

import pytest

from tandem.cli.run_charts import bar_chart


@pytest.mark.parametrize("values", [(-1.016e-09, 3.387e-10), (-1.234e-100, 0.0), (1.0, 2.0)])
def test_the_bars_of_a_chart_begin_in_one_column_however_long_the_numbers_are(values):
    assert len({line.index("│") for line in bar_chart(values).splitlines()}) == 1
