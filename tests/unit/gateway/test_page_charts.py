"""Charts of extreme numbers."""

from __future__ import annotations

import re

import numpy as np
import pytest

from gateway.api.pages.charts import line_chart
from gateway.runs.record.curves import Curve


@pytest.mark.parametrize("step", [0, 2**53 - 1])
@pytest.mark.parametrize(
    "values",
    [(1e308, -1e308), (1e308, 1e308), (5e-324, 5e-324), (1e-310, 0.0), (1.0, 1.0 + 2**-52)],
)
def test_the_largest_and_least_numbers_are_inside_the_chart(values, step):
    curve = Curve(np.array([step, step + 1]), np.array(values), np.zeros(2))
    last = curve.take(np.array([1]))
    assert is_inside(line_chart([(1, curve), (2, last)], title="t"))
    assert is_inside(line_chart([(1, last)], title="t"))


def is_inside(drawn):
    numbers = re.findall(r'\b(?:[xy]\d?|c[xy]|height)="([^"]+)"', drawn)
    numbers += re.findall(r"[^ ,]+", " ".join(re.findall(r'points="([^"]+)"', drawn)))
    return numbers and all(0 <= float(number) <= 400 for number in numbers)
