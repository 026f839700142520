"""The queue of the playground: the first visitor starts first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

TrialState = Literal["waiting", "running", "open", "ending", "ended"]
"""A `running` trial trains. The visitor uses the weights of an `open` one until its time is over.
Sessions and checkpoints of an `ending` one are removed."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A row of `trials`. Times are in seconds since 1970. `attempt` counts the claims of runners.
    `key_id` is the visitor's key. `reason` says why it ended or waits again, and `weights` is the
    path of the tuned weights."""

    id: str
    owner: str
    key_id: str
    blueprint: str
    model: str
    values: Mapping[str, bool | int | float | str]
    seed: int
    created_at: float
    state: TrialState = "waiting"
    reason: str = ""
    started_at: float | None = None
    ends_at: float | None = None
    ended_at: float | None = None
    attempt: int = 0
    numbers: Mapping[str, float] = field(default_factory=dict)
    violations: Mapping[str, str] = field(default_factory=dict)
    weights: str = ""


def waiting(trials: Iterable[Trial]) -> list[Trial]:
    """Return the waiting trials in their order. A trial whose runner was lost has its old place."""
    found = (each for each in trials if each.state == "waiting")
    return sorted(found, key=lambda each: (each.created_at, each.id))


def place_of(trial: Trial, trials: Iterable[Trial]) -> int:
    """Return the place of a waiting trial from 1 on, and 0 for others."""
    return 1 + waiting(trials).index(trial) if trial.state == "waiting" else 0


def next_trial(trials: Iterable[Trial], *, runs: int) -> Trial | None:
    """Return the trial that starts now. At most `runs` train at once."""
    found = list(trials)
    busy = sum(each.state == "running" for each in found)
    return next(iter(waiting(found)), None) if busy < runs else None
