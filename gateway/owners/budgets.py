"""Limits and budgets of single owners, which an admin sets while the gateway runs.

An owner's own limits replace those of the settings. A budget bounds its device-seconds and tokens
since the budget began. Trained tokens, computed prompt tokens and sampled tokens count. The table
of usage has the sums, so a budget survives restarts. When it is used up, `on_exhausted` ends the
owner's runs, and `Quotas` refuses new runs and samples."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from sqlalchemy import func, select

from gateway.owners.limits import Quotas
from gateway.storage.database import Database, from_row
from gateway.storage.tables import owner_limits, usage
from tandem.errors import BudgetExhausted
from tandem.telemetry import get_log

HOUR = 3600.0
OWN_LIMITS = ("sessions", "runs", "samplers", "checkpoint_bytes")
"""Limits of things that an owner may have of its own."""


@dataclass(frozen=True)
class BudgetUse:
    device_seconds: float = 0.0
    tokens: int = 0

    def __sub__(self, before: BudgetUse) -> BudgetUse:
        return BudgetUse(self.device_seconds - before.device_seconds, self.tokens - before.tokens)


@dataclass(frozen=True)
class OwnerLimits:
    """A row of `owner_limits`. `limits` are the owner's own. A budget of None does not bound.

    The budget counts since `since`, in seconds since 1970. `device_seconds_before` and
    `tokens_before` were used before."""

    owner: str
    limits: Mapping[str, int] = field(default_factory=dict)
    device_seconds: float | None = None
    tokens: int | None = None
    since: float = 0.0
    device_seconds_before: float = 0.0
    tokens_before: int = 0

    @property
    def has_budget(self) -> bool:
        return self.device_seconds is not None or self.tokens is not None

    def why_exhausted(self, used: BudgetUse) -> BudgetExhausted | None:
        spent = []
        if self.device_seconds is not None and used.device_seconds >= self.device_seconds:
            spent.append(
                f"{used.device_seconds / HOUR:.4g} of {self.device_seconds / HOUR:g} device-hours"
            )
        if self.tokens is not None and used.tokens >= self.tokens:
            spent.append(f"{used.tokens} of {self.tokens} tokens")
        if not spent:
            return None
        return BudgetExhausted(
            f"the budget of {self.owner} is used up: {' and '.join(spent)}. An admin can raise it "
            f"(`tandem owners set {self.owner}`)"
        )


class OwnerBudgets:
    """`on_exhausted` is called when a budget is used up, perhaps several times."""

    def __init__(self, *, database: Database, limits: Quotas) -> None:
        self._database = database
        self._quotas = limits
        self._put = database.insert_or_replace(owner_limits)
        self._owners: dict[str, OwnerLimits] = {}
        self._used: dict[str, BudgetUse] = {}
        limits.budgeted = self._used.keys()
        self._changing = asyncio.Lock()
        self.on_exhausted: Callable[[], None] = lambda: None
        self._log = get_log()

    async def open(self) -> None:
        rows = await self._database.read(select(owner_limits))
        found = [from_row(OwnerLimits, row) for row in rows]
        totals = await self._totals(each.owner for each in found if each.has_budget)
        for each in found:
            total = totals.get(each.owner, BudgetUse())
            self._set(
                each,
                BudgetUse(
                    max(0.0, total.device_seconds - each.device_seconds_before),
                    max(0, total.tokens - each.tokens_before),
                ),
            )

    def names(self) -> set[str]:
        return set(self._owners)

    def limits_of(self, owner: str) -> OwnerLimits:
        return self._owners.get(owner) or OwnerLimits(owner)

    def has_budget(self, owner: str) -> bool:
        return owner in self._used

    def used(self, owner: str) -> BudgetUse:
        """Return the use that counts toward the budget."""
        return self._used.get(owner, BudgetUse())

    def note_use(self, owner: str, *, device_seconds: float, tokens: int) -> None:
        used = self._used.get(owner)
        if used is not None:
            self._used[owner] = BudgetUse(
                used.device_seconds + device_seconds, used.tokens + tokens
            )
            self._look_at(owner)

    async def change(
        self, owner: str, changes: Mapping[str, float | int | None], *, anew: bool = False
    ) -> OwnerLimits:
        """Change the limits and budgets that `changes` names. None removes one.

        A new budget counts from now on, also an old one with `anew`. Write unwritten usage first.
        Raises `StorageFailed`."""
        async with self._changing:
            old = self.limits_of(owner)
            limits = {name: changes.get(name, old.limits.get(name)) for name in OWN_LIMITS}
            tokens = changes.get("tokens", old.tokens)
            new = replace(
                old,
                limits={name: int(value) for name, value in limits.items() if value is not None},
                device_seconds=changes.get("device_seconds", old.device_seconds),
                tokens=int(tokens) if tokens is not None else None,
            )
            begins = new.has_budget and (anew or not old.has_budget)
            # From now on, use is noted for the new budget too.
            before = self._used.setdefault(owner, BudgetUse()) if begins else BudgetUse()
            try:
                if begins:
                    new = await self._begun(new)
                await self._database.write(self._put, vars(new), durable=True)
            except BaseException:
                if not old.has_budget:
                    self._used.pop(owner, None)
                raise
            self._set(new, self.used(owner) - before)
        self._log.info("owner_limits", **vars(new))
        return new

    async def _begun(self, new: OwnerLimits) -> OwnerLimits:
        """Return limits whose budget counts from now on."""
        await self._database.flush()
        total = (await self._totals([new.owner])).get(new.owner, BudgetUse())
        return replace(
            new,
            since=time.time(),
            device_seconds_before=total.device_seconds,
            tokens_before=total.tokens,
        )

    def _set(self, new: OwnerLimits, used: BudgetUse) -> None:
        owner = new.owner
        self._owners[owner] = new
        self._quotas.own[owner] = new.limits
        self._used.pop(owner, None)
        if new.has_budget:
            self._used[owner] = used
        self._look_at(owner)

    def _look_at(self, owner: str) -> None:
        error = self.limits_of(owner).why_exhausted(self.used(owner))
        if error is None:
            self._quotas.exhausted.pop(owner, None)
        else:
            self._quotas.exhausted[owner] = error
            self.on_exhausted()

    async def _totals(self, owners: Iterable[str]) -> dict[str, BudgetUse]:
        tokens = usage.c.input_tokens - usage.c.cached_tokens + usage.c.output_tokens
        rows = await self._database.read(
            select(
                usage.c.owner,
                func.sum(usage.c.accelerator_seconds).label("seconds"),
                func.sum(tokens).label("tokens"),
            )
            .where(usage.c.owner.in_(list(owners)))
            .group_by(usage.c.owner)
        )
        return {row["owner"]: BudgetUse(float(row["seconds"]), int(row["tokens"])) for row in rows}
