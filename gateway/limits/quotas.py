"""The limits of owners: what an owner may have at once, and the error beyond that.

There are two kinds. What does not pass by waiting (runs, checkpoints, …) is `LimitExceeded`, a
403, which the SDK raises at once: whoever owns the things counts them, and calls `check`. What
passes (queues, bodies on their way) is `Overloaded`, a 429 with the time to retry after: the
ledgers count it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from gateway.limits.ledger import Ledger
from gateway.metrics import Metrics
from tandem.errors import LimitExceeded
from tandem.settings import LimitSettings

_CLOSE = "close the sessions that are no longer needed (ServiceClient.close())"
_FREE: Mapping[str, str] = {
    "sessions": f"{_CLOSE}; those without a heartbeat end by themselves",
    "runs": f"{_CLOSE}, and their runs end with them; checkpoints stay",
    "samplers": f"{_CLOSE}, and their samplers end with them",
    "sampling_sessions": f"{_CLOSE}; ephemeral ones that nobody uses end by themselves",
    "checkpoint_bytes": "delete checkpoints (`tinker checkpoint delete`), or give them a ttl "
    "(`tinker checkpoint set-ttl`)",
}


class Quotas:
    def __init__(self, *, settings: LimitSettings, metrics: Metrics) -> None:
        self._settings = settings
        self._metrics = metrics
        self.operations = self._ledger("queued_operations", "queued operations")
        self.operation_bytes = self._ledger("queued_bytes", "bytes of queued operations")
        self.samples = self._ledger("waiting_samples", "waiting samples")
        self.held = self._ledger("held_bytes", "bytes of waiting requests")
        self.bodies = self._ledger("body_bytes", "bytes of arriving requests")
        self.requests = self._ledger("requests", "open requests")

    def check(self, what: str, *, used: int) -> None:
        """Raise `LimitExceeded` if an owner that uses so many may not have one more.

        `what` is the field of `LimitSettings`."""
        limit: int = getattr(self._settings, what)
        if used >= limit:
            raise self._exceeded(what, limit=limit, used=used)

    def check_checkpoint_bytes(self, *, used: int, expected: int, replaced: int = 0) -> None:
        """Raise `LimitExceeded` if a checkpoint of `expected` bytes, in place of one of
        `replaced`, is too much for an owner that uses so many bytes.

        Saves that run at the same time do not count each other, so that several runs can each
        exceed the limit once."""
        limit = self._settings.checkpoint_bytes
        if used - replaced + expected > limit:
            raise self._exceeded(
                "checkpoint_bytes", limit=limit, used=used, more=f", and {expected} are to come"
            )

    def reserve_operation(
        self, owner: str, *, size: int, held: int, forced: bool
    ) -> ExitStack[None]:
        """Reserve room in the queue for an operation of `size` bytes, of which memory holds
        `held`; closing the result releases it. Raises `Overloaded`, unless `forced`."""
        amounts = ((self.operations, 1), (self.operation_bytes, size), (self.held, held))
        return self._reserve(owner, amounts, forced=forced)

    def reserve_sample(self, owner: str, *, size: int) -> ExitStack[None]:
        """As `reserve_operation`, for a sample whose request has `size` bytes in memory."""
        return self._reserve(owner, ((self.samples, 1), (self.held, size)), forced=False)

    def _reserve(
        self, owner: str, amounts: Sequence[tuple[Ledger, int]], *, forced: bool
    ) -> ExitStack[None]:
        """Reserve everything or nothing."""
        if not forced:
            for ledger, amount in amounts:
                ledger.check(owner, amount)
        reserved: ExitStack[None] = ExitStack()
        for ledger, amount in amounts:
            reserved.callback(ledger.reserve(owner, amount, forced=True).release)
        return reserved

    def note_refusal(self, limit: str) -> None:
        self._metrics.refusals.labels(limit=limit).inc()

    def _exceeded(self, what: str, *, limit: int, used: int, more: str = "") -> LimitExceeded:
        self.note_refusal(what)
        words = what.replace("_", " ")
        return LimitExceeded(
            f"the limit of {words} is {limit} for each owner (TANDEM_LIMIT_{what.upper()}), "
            f"{used} are used{more}; {_FREE.get(what, _CLOSE)}",
            limit=what,
            value=limit,
            used=used,
        )

    def _ledger(self, limit: str, what: str) -> Ledger:
        """Make a ledger with the limits of these names in the settings, for each owner and, if
        there is one, for all together."""
        return Ledger(
            limit=limit,
            what=what,
            per_owner=getattr(self._settings, limit),
            in_all=getattr(self._settings, f"{limit}_in_all", 2**62),
            refused=self.note_refusal,
        )
