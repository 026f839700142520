"""The limits of an owner and their errors.

A limit of things such as runs and checkpoints raises `LimitExceeded` (403) from `Quotas.check`,
because waiting does not help. The caller counts the things. Queues and arriving bodies shrink by
themselves: a `Ledger` counts them and raises `Overloaded` (429) with a time to retry.

An admin may give an owner its own limits, and a budget (`budgets`).

To add a limit, add a field of `LimitSettings` or a line in `BOUNDS`. For things, add a call of
`Quotas.check` at their creation and a line in `_FREE`. For amounts, add a ledger in `Quotas` and a
reservation."""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from gateway.metrics import Metrics
from tandem.errors import BudgetExhausted, LimitExceeded, Overloaded
from tandem.settings.requests import LimitSettings

_CLOSE = 'close unneeded sessions (ServiceClient.close("success"))'
_FREE: Mapping[str, str] = {
    "sessions": f"{_CLOSE}; those without a heartbeat end by themselves",
    "runs": f"{_CLOSE}, and their runs end. Checkpoints stay",
    "samplers": f"{_CLOSE}, and their samplers end",
    "sampling_sessions": f"{_CLOSE}; ephemeral ones that nobody uses end by themselves",
    "traces": "delete the traces that you have read; ended ones are deleted after a day",
    "checkpoint_bytes": "delete checkpoints (`tinker checkpoint delete`), or give them a ttl "
    "(`tinker checkpoint set-ttl`)",
}
BOUNDS = {
    "sampling_sessions": 10_000,
    "custom_losses": 1024,
    "traces": 10_000,
    "held_bytes": 256 * 2**20,
    "held_bytes_in_all": 2**30,
    "body_bytes": 256 * 2**20,
    "body_bytes_in_all": 2**30,
    "queued_operations_in_all": 65_536,
    "queued_bytes": 2 * 2**30,
    "queued_bytes_in_all": 8 * 2**30,
    "waiting_samples_in_all": 32_768,
    "requests": 8192,
}
"""Limits that no deployment needs to change. `_in_all` means all owners together."""
_MIN_RETRY_AFTER = 1.0
_MAX_RETRY_AFTER = 10.0
"""Seconds. Well below `GAP_TIMEOUT`, so that a refused operation returns before its successors are
given up."""
_RATE_WINDOW = 30.0
"""The time constant of a rate, in seconds."""
_ASSUMED_RATE = 10.0
"""Completions per second if none was measured."""


class Quotas:
    def __init__(self, *, settings: LimitSettings, metrics: Metrics) -> None:
        self._settings = settings
        self._limits: dict[str, int] = BOUNDS | settings.model_dump()
        self._metrics = metrics
        self.own: dict[str, Mapping[str, int]] = {}
        """The own limits of owners."""
        self.exhausted: dict[str, BudgetExhausted] = {}
        """The errors of owners without a budget left."""
        self.budgeted: Collection[str] = ()
        """The owners with a budget."""
        self.operations = self._ledger("queued_operations", "queued operations")
        self.operation_bytes = self._ledger("queued_bytes", "bytes of queued operations")
        self.samples = self._ledger("waiting_samples", "waiting samples")
        self.held = self._ledger("held_bytes", "bytes of waiting requests")
        self.bodies = self._ledger("body_bytes", "bytes of arriving requests")
        self.requests = self._ledger("requests", "open requests")
        self._register_gauges()

    def limit_of(self, what: str, owner: str) -> int:
        return self.own.get(owner, {}).get(what, self._limits[what])

    def check_budget(self, owner: str) -> None:
        """Raise `BudgetExhausted` if nothing is left of the owner's budget."""
        if (error := self.exhausted.get(owner)) is not None:
            self.note_refusal("budget")
            raise BudgetExhausted(error.message)

    def check(self, what: str, *, owner: str, used: int, adding: int = 1) -> None:
        """Raise `LimitExceeded` if an owner with `used` things may not add more. `what` names the
        limit. Concurrent slow additions, such as saves, may each exceed it once."""
        limit = self.limit_of(what, owner)
        if used + adding <= limit:
            return
        self.note_refusal(what)
        whose = owner if what in self.own.get(owner, {}) else f"each owner{_setting_of(what)}"
        more = f", and {adding} are to come" if adding > 1 else ""
        raise LimitExceeded(
            f"the limit of {what.replace('_', ' ')} is {limit} for {whose}, {used} are used{more}; "
            f"{_FREE.get(what, _CLOSE)}",
            limit=what,
            value=limit,
            used=used,
        )

    def reserve(
        self, owner: str, *amounts: tuple[Ledger, int], forced: bool = False
    ) -> Reservations:
        """Reserve all amounts or none. Raises `Overloaded`, unless `forced`."""
        if not forced:
            for ledger, amount in amounts:
                ledger.check(owner, amount)
        return Reservations(
            [ledger.reserve(owner, amount, forced=True) for ledger, amount in amounts]
        )

    @property
    def unnamed_bytes(self) -> int:
        """Bytes of unnamed weights that an owner may have on disk."""
        return self._settings.unnamed_bytes

    def _register_gauges(self) -> None:
        watch = self._metrics.watch
        watch(
            "queued_bytes",
            "Bytes of the payloads on disk of operations that have not ended.",
            lambda: self.operation_bytes.total,
        )
        watch("held_bytes", "Bytes of the requests that wait in memory.", lambda: self.held.total)
        watch(
            "body_bytes",
            "Bytes of the bodies that are being received or handled.",
            lambda: self.bodies.total,
        )
        watch(
            "open_requests",
            "Requests that are being answered, including long polls.",
            lambda: self.requests.total,
        )

    def note_refusal(self, limit: str) -> None:
        self._metrics.refusals.labels(limit=limit).inc()

    def _ledger(self, limit: str, what: str) -> Ledger:
        return Ledger(
            limit=limit,
            what=what,
            per_owner=self._limits[limit],
            in_all=self._limits.get(f"{limit}_in_all", 2**62),
            refused=self.note_refusal,
        )


def _setting_of(limit: str) -> str:
    return f" (TANDEM_LIMIT_{limit.upper()})" if limit in LimitSettings.model_fields else ""


class Rate:
    """Recent completions per second. A completion `_RATE_WINDOW` seconds ago counts 1/e."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._value = 0.0
        self._at = clock()

    def note(self, count: int = 1) -> None:
        self._value = self.per_second() + count / _RATE_WINDOW
        self._at = self._clock()

    def per_second(self) -> float:
        return self._value * math.exp((self._at - self._clock()) / _RATE_WINDOW)


@dataclass(slots=True)
class Reservation:
    """An owner's amount in a ledger, until `release`."""

    ledger: Ledger
    owner: str
    amount: int

    def extend(self, amount: int) -> None:
        self.ledger.check(self.owner, amount, held=self.amount)
        self.ledger.add(self.owner, amount)
        self.amount += amount

    def shrink(self, amount: int) -> None:
        self.ledger.remove(self.owner, amount)
        self.amount -= amount

    def release(self) -> None:
        if self.amount:
            self.ledger.remove(self.owner, self.amount)
            self.amount = 0


class Reservations:
    """Amounts in several ledgers, until `close` or the end of a `with` block. Each waiting sample
    has one, so it is smaller than an `ExitStack`."""

    __slots__ = ("_parts",)

    def __init__(self, parts: list[Reservation]) -> None:
        self._parts = parts

    def __enter__(self) -> Reservations:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for part in self._parts:
            part.release()

    def take_over(self) -> Reservations:
        """Return the amounts as reservations that a `with` block of these ones does not end."""
        parts, self._parts = self._parts, []
        return Reservations(parts)


@dataclass(eq=False, kw_only=True)
class Ledger:
    """Counts an amount per owner and for all owners. `what` describes it in messages. `limit` is
    its name.

    An owner with nothing reserved passes its own limit, so that one oversized item can pass."""

    limit: str
    what: str
    per_owner: int
    in_all: int
    refused: Callable[[str], None]

    def __post_init__(self) -> None:
        # By owner. None holds the sum of all owners.
        self._held: Counter[str | None] = Counter()
        self._rates: defaultdict[str | None, Rate] = defaultdict(Rate)

    @property
    def total(self) -> int:
        return self._held[None]

    def reserve(self, owner: str, amount: int = 1, *, forced: bool = False) -> Reservation:
        """Raises `Overloaded`, unless `forced`."""
        if not forced:
            self.check(owner, amount)
        self.add(owner, amount)
        return Reservation(ledger=self, owner=owner, amount=amount)

    def has_room(self, owner: str, amount: int, *, share: float) -> bool:
        """Return whether the new total stays within this share of the limits."""
        return (
            self._held[owner] + amount <= share * self.per_owner
            and self.total + amount <= share * self.in_all
        )

    def check(self, owner: str, amount: int, *, held: int = 0) -> None:
        """Raise `Overloaded` above a limit. `held` is this request's earlier amount."""
        self._check(owner, amount, held, most=self.per_owner, whose="this owner", in_all="")
        self._check(None, amount, held, most=self.in_all, whose="all owners", in_all="_in_all")

    def _check(
        self, owner: str | None, amount: int, held: int, *, most: int, whose: str, in_all: str
    ) -> None:
        waiting = self._held[owner]
        if waiting > held and waiting + amount > most:
            self.refused(self.limit)
            raise overloaded(
                f"{waiting} {self.what} of {whose} are held already, {most} at most"
                f"{_setting_of(self.limit + in_all)}",
                limit=self.limit,
                waiting=waiting,
                per_second=self._rates[owner].per_second(),
            )

    def add(self, owner: str, amount: int) -> None:
        self._held[owner] += amount
        self._held[None] += amount

    def remove(self, owner: str, amount: int) -> None:
        self._held[None] -= amount
        self._rates[None].note(amount)
        self._held[owner] -= amount
        if self._held[owner] > 0:
            self._rates[owner].note(amount)
        else:
            del self._held[owner]
            self._rates.pop(owner, None)


def overloaded(sentence: str, *, limit: str, waiting: int, per_second: float) -> Overloaded:
    seconds = retry_after(per_second, waiting=waiting)
    return Overloaded(
        f"{sentence}; ask again in {seconds:g} s",
        limit=limit,
        retry_after=seconds,
        position=waiting + 1,
    )


def retry_after(per_second: float, *, waiting: int) -> float:
    """Return the whole seconds, from 1 to 10, until a tenth of the queue completes.

    Example: 1000 wait and 20 complete per second: 5 seconds."""
    seconds = waiting / 10 / (per_second if per_second > 0 else _ASSUMED_RATE)
    return float(math.ceil(min(max(seconds, _MIN_RETRY_AFTER), _MAX_RETRY_AFTER)))
