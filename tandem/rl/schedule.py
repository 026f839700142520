"""Learning-rate schedules."""

from __future__ import annotations


def linear_decay(*, step: int, steps: int, peak: float, final: float, warmup: int = 0) -> float:
    """Return the rate of a step of 1…`steps`: linear from `peak` down to `final * peak`.

    Before that, it rises in `warmup` equal parts. Example:
    `linear_decay(step=10, steps=10, peak=5e-4, final=0.1)` is `5e-5`, and
    `linear_decay(step=1, steps=10, peak=5e-4, final=0.1, warmup=1)` is `2.5e-4`."""
    if step <= warmup:
        return peak * step / (warmup + 1)
    through = (step - 1 - warmup) / max(steps - 1 - warmup, 1)
    return peak * (1 - through * (1 - final))
