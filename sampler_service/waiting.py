"""Requests and loads that wait for the engine, in the order in which they arrived."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from sampler_service.reload import LoadOutcome, Version
from sampler_service.work import Waiter
from tandem.errors import TandemError


class WaitingList:
    """Belongs to the engine's thread; others may ask for its length."""

    def __init__(self) -> None:
        self._waiters: list[Waiter] = []

    def __len__(self) -> int:
        return len(self._waiters)

    def __iter__(self) -> Iterator[Waiter]:
        return iter(self._waiters)

    def extend(self, waiters: Iterable[Waiter]) -> None:
        self._waiters.extend(waiters)

    def forget(self, ids: Collection[str]) -> None:
        """Drops requests by their ids; nobody waits for them any more."""
        self._waiters = [w for w in self._waiters if w.job is None or w.job.request.id not in ids]

    def drop_given_up(self) -> None:
        """A load has no id to be cancelled by: that its caller went shows in its future."""
        self._waiters = [w for w in self._waiters if not w.given_up]

    def remove(self, waiters: Collection[Waiter]) -> None:
        gone = set(waiters)
        self._waiters = [w for w in self._waiters if w not in gone]

    def clear(self) -> list[Waiter]:
        """Drops and returns all."""
        waiters, self._waiters = self._waiters, []
        return waiters

    def fail(self, version: Version, error: TandemError, *, by_weights: bool = False) -> None:
        """Fails those who named a version, or, `by_weights`, those who need it loaded."""
        failed = [w for w in self if (w.weights if by_weights else w.version) == version]
        self.remove(failed)
        for waiter in failed:
            waiter.fail(error)

    def answer_loads(self, outcome: LoadOutcome) -> None:
        """Tells those who asked for a load that the version serves."""
        loads = [w for w in self if w.job is None and w.version == outcome.version]
        self.remove(loads)
        for waiter in loads:
            if waiter.loaded.set_running_or_notify_cancel():
                waiter.loaded.set_result(outcome)
