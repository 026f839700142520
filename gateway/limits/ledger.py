"""Bounded amounts: how much of something each owner holds, and all owners together."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from tandem.errors import Overloaded

_MIN_RETRY_AFTER = 1.0
_MAX_RETRY_AFTER = 10.0
"""Seconds. Well below `sequence_gap_timeout`, so that a refused operation comes back before those
behind it are given up."""
_RATE_WINDOW = 30.0
"""Seconds over which a rate is measured."""
_ASSUMED_RATE = 10.0
"""Completions per second where none was measured."""


class Rate:
    """Recent completions per second. One of `_RATE_WINDOW` seconds ago counts 1/e."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._value = 0.0
        self._at = clock()

    def note(self, count: int = 1) -> None:
        self._value = self.per_second() + count / _RATE_WINDOW
        self._at = self._clock()

    def per_second(self) -> float:
        return self._value * math.exp((self._at - self._clock()) / _RATE_WINDOW)


@dataclass
class Reservation:
    """What an owner holds of a ledger, until `release`."""

    ledger: Ledger
    owner: str
    amount: int

    def extend(self, amount: int) -> None:
        """Reserve more. Raises `Overloaded`, and keeps what was reserved before."""
        self.ledger.check(self.owner, amount, held=self.amount)
        self.ledger.add(self.owner, amount)
        self.amount += amount

    def release(self) -> None:
        """Return the amount. Does nothing the second time."""
        if self.amount:
            self.ledger.remove(self.owner, self.amount)
            self.amount = 0


class Ledger:
    """`what` says what is counted, for messages; `limit` is its name in the settings.

    An owner that holds nothing always passes its own limit, so that one oversized item can pass.
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

    def reserve(self, owner: str, amount: int = 1, *, forced: bool = False) -> Reservation:
        """Raises `Overloaded`, unless `forced`."""
        if not forced:
            self.check(owner, amount)
        self.add(owner, amount)
        return Reservation(ledger=self, owner=owner, amount=amount)

    def empty_reservation(self, owner: str) -> Reservation:
        """Return a reservation of nothing, to be extended."""
        return Reservation(ledger=self, owner=owner, amount=0)

    def has_room(self, owner: str, amount: int) -> bool:
        return (
            self._held[owner] + amount <= self._per_owner and self._total + amount <= self._in_all
        )

    def check(self, owner: str, amount: int, *, held: int = 0) -> None:
        """Raises `Overloaded`. `held` is what the same request holds already."""
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
        self._held[owner] -= amount
        self._total -= amount
        self._rate.note(amount)
        self._rates.setdefault(owner, Rate(clock=self._clock)).note(amount)
        if self._held[owner] <= 0:
            del self._held[owner]
            del self._rates[owner]

    def _overloaded(self, sentence: str, *, rate: Rate | None, waiting: int) -> Overloaded:
        self._refused(self.limit)
        per_second = rate.per_second() if rate is not None else 0.0
        return overloaded(sentence, limit=self.limit, waiting=waiting, per_second=per_second)


def overloaded(sentence: str, *, limit: str, waiting: int, per_second: float) -> Overloaded:
    """Return the error of a queue with `waiting` items of which so many complete per second."""
    seconds = retry_after(per_second, waiting=waiting)
    return Overloaded(
        f"{sentence}; ask again in {seconds:g} s",
        limit=limit,
        retry_after=seconds,
        position=waiting + 1,
    )


def retry_after(per_second: float, *, waiting: int) -> float:
    """Return the whole seconds, from 1 to 10, in which a tenth of what waits completes.

    Literal example: 1000 wait and 20 complete per second: 5 seconds.
    """
    seconds = waiting / 10 / (per_second if per_second > 0 else _ASSUMED_RATE)
    return float(math.ceil(min(max(seconds, _MIN_RETRY_AFTER), _MAX_RETRY_AFTER)))
