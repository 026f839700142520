"""The order in which workers get the devices of a group, and when a holder has to give way.

Pure functions of what the scheduler (`leases`) knows, in seconds of its clock."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from tandem.settings.sharing import SharingSettings

ROUND_TRIP = 0.02
"""Within which a client that has just been answered sends its next request."""
_SWITCHES_PER_QUANTUM = 10
"""So that a tenth of the time at most goes into switches where everybody is busy."""


@dataclass(frozen=True)
class Waiter:
    """A worker that waits since `since`; `served_at` is when it last had the devices (0: never)."""

    key: str
    owner: str
    priority: int
    since: float
    served_at: float


@dataclass(frozen=True)
class Holder:
    """A worker that has the devices since `granted_at`. `idle_since` is None while it is at work.
    `in_step`: it holds gradients that no step has applied yet."""

    granted_at: float
    idle_since: float | None
    in_step: bool


def in_turn(
    waiting: Iterable[Waiter],
    *,
    now: float,
    max_wait: float,
    share_of: Callable[[str], float],
) -> list[Waiter]:
    """Return who is next, and who after them. Those who have waited for `max_wait` come first, the
    longest wait before others; then by priority, by what their owner has had of the devices
    (`share_of`: seconds divided by the owner's weight), and least recently served first."""

    def place(each: Waiter) -> tuple[float, ...]:
        if now - each.since >= max_wait:
            return (0, each.since, 0, 0, 0)
        return (1, -each.priority, share_of(each.owner), each.served_at, each.since)

    return sorted(waiting, key=place)


def gives_way_at(
    holder: Holder,
    *,
    waiting: Sequence[Waiter],
    switch_seconds: float,
    settings: SharingSettings,
) -> float:
    """Return when a holder is to give way, as far as is known now; infinity: not before something
    changes. `switch_seconds` is what a switch has cost lately."""
    patience = max(ROUND_TRIP, switch_seconds)
    if not waiting:
        return _sleeps_at(holder, patience=patience, settings=settings)
    quantum = max(settings.quantum, _SWITCHES_PER_QUANTUM * switch_seconds)
    due = math.inf if holder.in_step else holder.granted_at + quantum
    if holder.idle_since is not None:
        wait = max(settings.quantum, patience) if holder.in_step else patience
        due = min(due, holder.idle_since + wait)
    overdue = min(each.since for each in waiting) + settings.max_wait
    return min(due, max(overdue, holder.granted_at + settings.quantum))


def _sleeps_at(holder: Holder, *, patience: float, settings: SharingSettings) -> float:
    """The same where nobody waits."""
    if holder.idle_since is None or settings.policy == "deferred":
        return math.inf
    if settings.policy == "idle_after":
        return holder.idle_since + settings.idle_after
    return math.inf if holder.in_step else holder.idle_since + patience
