"""Learning-rate schedules."""

from __future__ import annotations


def linear_decay(*, step: int, steps: int, peak: float, final: float, first: float = 1.0) -> float:
    """Return the rate of a step of 1…`steps`: linear from `peak` down to `final * peak`.

    The first step, with empty optimizer moments, is multiplied by `first`. Example:
    `linear_decay(step=10, steps=10, peak=5e-4, final=0.1)` is `5e-5`."""
    through = (step - 1) / max(steps - 1, 1)
    rate = peak * (1 - through * (1 - final))
    return rate * first if step == 1 else rate
