"""The index of a record: counters, the newest values, and the progress of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from gateway.runs.record.metrics import MetricsRow

_SMOOTHING = 0.2
"""The weight of the newest step in `pace`."""


@dataclass(frozen=True)
class StepProgress:
    """`percent` and `eta_seconds` are None without `total_steps`, `eta_seconds` also without two
    steps. `last_updated_at` is in seconds since 1970."""

    step: int
    total_steps: int | None
    percent: float | None
    eta_seconds: float | None
    last_updated_at: float


@dataclass(frozen=True)
class RecordIndex:
    """A row of `run_records`. `step` never falls while one side counts the steps."""

    run_id: str
    step: int | None = None
    first_step: int | None = None
    by_user: bool = False
    step_at: float | None = None
    pace: float | None = None
    last: Mapping[str, float | str] = field(default_factory=dict)
    rows: int = 0
    rollouts: int = 0
    bytes: int = 0
    dropped: int = 0
    updated_at: float = 0.0

    def with_rows(
        self, rows: Sequence[MetricsRow], last: Mapping[str, float | str], *, by_user: bool
    ) -> RecordIndex:
        """Return the index after rows of metrics and their values as JSON. The user's first step
        replaces the optimizer's steps."""
        merged = {**self.last, **last}
        if "reward" in merged:
            merged.pop("tandem/reward", None)  # the rollouts' mean, in place of the user's number
        index = replace(self, rows=self.rows + len(rows), last=merged)
        if not rows or (self.by_user and not by_user):
            return index
        low, top = min(row.step for row in rows), max(row.step for row in rows)
        now = self.updated_at
        if self.step is None or self.first_step is None or by_user != self.by_user:
            index = replace(index, by_user=by_user, step=top, first_step=low)
            return replace(index, step_at=now, pace=None)
        index = replace(index, first_step=min(low, self.first_step))
        if top <= self.step:
            return index
        newest = max(now - (now if self.step_at is None else self.step_at), 0.0) / (top - self.step)
        pace = newest if self.pace is None else self.pace + _SMOOTHING * (newest - self.pace)
        return replace(index, step=top, step_at=now, pace=pace)

    def progress(self, config: Mapping[str, object] | None) -> StepProgress | None:
        """Return the progress, with the `total_steps` of the run's configuration. None before the
        first step. A run that counts from 0 has done step 0 when it logs it."""
        if self.step is None:
            return None
        total = (config or {}).get("total_steps")
        if isinstance(total, bool) or not isinstance(total, int | float) or not 1 <= total < 2**53:
            return StepProgress(self.step, None, None, None, self.updated_at)
        done = min(self.step + (self.first_step == 0), total)
        left = total - done
        return StepProgress(
            step=self.step,
            total_steps=math.ceil(total),
            percent=round(100 * done / total, 2),
            eta_seconds=round(self.pace * left, 1) if self.pace is not None else None,
            last_updated_at=self.updated_at,
        )
