"""Who holds how much of something that is bounded, for each owner and in all."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from tandem.errors import Overloaded

_SHORTEST_WAIT = 1.0
_LONGEST_WAIT = 10.0
"""Seconds that a client is asked to wait. Well below `sequence_gap_timeout`, so that an
operation that was sent away comes back before those behind it are given up."""
_MEMORY = 30.0
"""Seconds over which a rate is measured."""
_SUPPOSED = 10.0
_ROOM = 10
"""A client is asked to come back when a tenth of the queue has been worked off."""


class Rate:
    """How many things end in a second, of late. A thing of `_MEMORY` seconds ago counts 1/e."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._value = 0.0
        self._at = clock()

    def note(self, count: int = 1) -> None:
        self._value = self.per_second() + count / _MEMORY
        self._at = self._clock()

    def per_second(self) -> float:
        return self._value * math.exp((self._at - self._clock()) / _MEMORY)


@dataclass
class Reservation:
    """What was taken. Give it back once; a second time does nothing."""

    ledger: Ledger
    owner: str
    amount: int

    def more(self, amount: int) -> None:
        """Takes more. Raises `Overloaded`; then what was taken before is still held."""
        self.ledger.check(self.owner, amount, held=self.amount)
        self.ledger.add(self.owner, amount)
        self.amount += amount

    def give_back(self) -> None:
        if self.amount:
            self.ledger.remove(self.owner, self.amount)
            self.amount = 0


class Ledger:
    """`what` is what is counted, in words; `limit` its name in the settings and in answers.

    Who holds nothing is always let in by its own bound, so that one thing larger than the
    bound is not refused for ever.
    """

    def __init__(
        self,
        *,
        limit: str,
        what: str,
        per_owner: int,
        in_all: int,
        refused: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limit = limit
        self._what = what
        self._per_owner = per_owner
        self._in_all = in_all
        self._refused = refused
        self._clock = clock
        self._held: Counter[str] = Counter()
        self._rates: dict[str, Rate] = {}
        self._total = 0
        self._rate = Rate(clock=clock)

    @property
    def total(self) -> int:
        return self._total

    def held_by(self, owner: str) -> int:
        return self._held[owner]

    def take(self, owner: str, amount: int = 1, *, forced: bool = False) -> Reservation:
        """Raises `Overloaded`. `forced`: whatever the bounds say."""
        if not forced:
            self.check(owner, amount)
        self.add(owner, amount)
        return Reservation(ledger=self, owner=owner, amount=amount)

    def empty_lease(self, owner: str) -> Reservation:
        """One that takes its amounts later."""
        return Reservation(ledger=self, owner=owner, amount=0)

    def has_room(self, owner: str, amount: int) -> bool:
        return (
            self._held[owner] + amount <= self._per_owner and self._total + amount <= self._in_all
        )

    def check(self, owner: str, amount: int, *, held: int = 0) -> None:
        """Raises `Overloaded`. `held`: what the same request has taken already."""
        mine = self._held[owner]
        if mine > held and mine + amount > self._per_owner:
            raise self._overloaded(
                f"{mine} {self._what} of this owner are held already, {self._per_owner} at most "
                f"(TANDEM_LIMIT_{self.limit.upper()})",
                rate=self._rates.get(owner),
                waiting=mine,
            )
        if self._total > held and self._total + amount > self._in_all:
            raise self._overloaded(
                f"{self._total} {self._what} of all owners are held already, {self._in_all} at "
                f"most (TANDEM_LIMIT_{self.limit.upper()}_IN_ALL)",
                rate=self._rate,
                waiting=self._total,
            )

    def add(self, owner: str, amount: int) -> None:
        self._held[owner] += amount
        self._total += amount

    def remove(self, owner: str, amount: int) -> None:
        """What was held has ended."""
        self._held[owner] -= amount
        self._total -= amount
        self._rate.note(amount)
        self._rates.setdefault(owner, Rate(clock=self._clock)).note(amount)
        if self._held[owner] <= 0:
            del self._held[owner]
            del self._rates[owner]

    def _overloaded(self, sentence: str, *, rate: Rate | None, waiting: int) -> Overloaded:
        self._refused(self.limit)
        seconds = wait_for_room(rate.per_second() if rate is not None else 0.0, waiting=waiting)
        return Overloaded(
            f"{sentence}; ask again in {seconds:g} s",
            limit=self.limit,
            retry_after=seconds,
            position=waiting + 1,
        )


def wait_for_room(per_second: float, *, waiting: int) -> float:
    """Whole seconds until a tenth of what waits has ended, at this rate; between 1 and 10.
    Where nothing has ended of late, ten ends in a second are supposed.

    Literal example: 1000 wait and 20 end in a second: 5 seconds.
    """
    seconds = waiting / _ROOM / (per_second if per_second > 0 else _SUPPOSED)
    return float(math.ceil(min(max(seconds, _SHORTEST_WAIT), _LONGEST_WAIT)))
