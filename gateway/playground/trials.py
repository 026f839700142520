"""The trials of the playground, from their request until nothing of them is left."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from sqlalchemy import delete, func, insert, or_, select, update

from gateway.checkpoints.base_models import BaseModels
from gateway.checkpoints.catalog import CheckpointCatalog
from gateway.owners.auth.identity import Caller
from gateway.owners.auth.keys import KeyStore, NewKey
from gateway.owners.budgets import HOUR
from gateway.owners.limits import Quotas
from gateway.owners.sessions.registry import SessionRegistry
from gateway.playground.queue import Trial, next_trial, place_of, waiting
from gateway.storage.database import Database, from_row
from gateway.storage.tables import playground_closed, runs, sessions, trials, usage
from tandem.blueprints.catalog import blueprint_named, find_blueprints
from tandem.blueprints.description import Blueprint
from tandem.errors import (
    Overloaded,
    PermissionDenied,
    StorageFailed,
    TandemError,
    UnknownTrial,
)
from tandem.settings.playground import PlaygroundSettings
from tandem.telemetry import get_log

MOST_WAITING = 100
_SILENCE = 30.0
"""Seconds after which a silent runner is lost."""
_LONGEST_WAIT = 86_400.0
_TOLD_AFTER = 10.0
"""Seconds without a request of a runner, after which visitors hear of it."""
_VISITORS = ("member", "maintainer", "admin")
_MOST_ATTEMPTS = 2
_RETRY_AFTER = 10.0


@dataclass(frozen=True)
class ClaimedTrial:
    """A trial for a runner. `key` is the secret of a key of the visitor."""

    trial: Trial
    key: str


@dataclass(eq=False, repr=False, kw_only=True)
class Playground:
    """`end_session_soon` begins the end of a session."""

    settings: PlaygroundSettings
    database: Database
    keys: KeyStore
    limits: Quotas
    models: BaseModels
    checkpoints: CheckpointCatalog
    sessions: SessionRegistry
    end_session_soon: Callable[..., None]
    clock: Callable[[], float] = time.time
    monotonic: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._live: dict[str, Trial] = {}
        self._arriving = set[str]()
        self._heard: dict[str, float] = {}
        self._asked_at = self.monotonic()
        self.used_tokens: Mapping[str, int] = {}
        """The tokens of running and open trials, as of the last look."""
        self._claiming, self._looking = asyncio.Lock(), asyncio.Lock()
        self.closed = False
        self._log = get_log()

    async def read_trials(self) -> None:
        """Read the trials of an earlier gateway. Their runners have their whole time again."""
        rows = await self.database.read(select(trials).where(trials.c.state != "ended"))
        self._live = {row["id"]: from_row(Trial, row) for row in rows}
        self._heard = dict.fromkeys(self._live, self.monotonic())
        self.closed = bool(await self.database.read(select(playground_closed)))

    def all(self) -> list[Trial]:
        """Return the trials that have not ended."""
        return list(self._live.values())

    def place_of(self, trial: Trial) -> int:
        now = self._live.get(trial.id)  # perhaps it changed since the caller read it
        return place_of(now, self.all()) if now is not None else 0

    def why_waits(self, trial: Trial) -> str:
        """Return why a waiting trial does not start, "" if others train or it has just come."""
        silent = self.monotonic() - self._asked_at
        if trial.state != "waiting":
            return ""
        if self.closed:
            return "the playground is closed for now"
        if silent > _TOLD_AFTER and self.count_in("running") < self.settings.runs:
            return f"no runner has asked for a trial for {silent:.0f} s"
        return ""

    def count_in(self, state: str) -> int:
        return sum(each.state == state for each in self.all())

    async def find_trial(self, trial_id: str) -> Trial:
        """Return a trial, also an ended one. Raises `UnknownTrial`."""
        found = self._live.get(trial_id)
        if found is None:
            row = await self.database.read_one(select(trials).where(trials.c.id == trial_id))
            if row is None:
                raise unknown_trial(trial_id)
            found = from_row(Trial, row)
        return found

    async def list_trials(self, owner: str | None, *, limit: int, offset: int) -> list[Trial]:
        """Return a page of trials, newest first. None stands for all owners."""
        newest = select(trials).order_by(trials.c.created_at.desc(), trials.c.id)
        if owner is not None:
            newest = newest.where(trials.c.owner == owner)
        rows = await self.database.read(newest.limit(limit).offset(offset))
        return [self._live.get(row["id"]) or from_row(Trial, row) for row in rows]

    async def blueprints(self) -> dict[str, Blueprint | str]:
        """Return the blueprints by name, or the reason why one is unusable."""
        return await asyncio.to_thread(find_blueprints)

    # --- Requests of visitors -----------------------------------------------------------------

    async def start_trial(
        self, caller: Caller, *, blueprint: str, model: str, values: Mapping[str, object], seed: int
    ) -> Trial:
        """Put a trial into the queue, and return it when it is durable. It ends with the caller's
        key.

        Raises `PermissionDenied` while the playground is closed, `Overloaded` with the place in the
        queue for an owner with a trial, and for a full queue. Raises `InvalidField`,
        `InvalidRequest`, `UnknownModel` or `UserError` for a wrong request, and `BudgetExhausted`,
        `StorageFull` or `StorageFailed`."""
        self._check_open()
        found = await asyncio.to_thread(blueprint_named, blueprint)
        checked = found.values_of(values)
        name = self.models.get(model).name
        found.chosen_model([name], asked=name)
        self.limits.check_budget(caller.owner)
        self._check_room(caller.owner)
        trial = Trial(
            id=f"trial-{secrets.token_hex(6)}",
            owner=caller.owner,
            key_id=caller.key_id,
            blueprint=blueprint,
            model=name,
            values=checked,
            seed=seed,
            created_at=self.clock(),
        )
        self._arriving.add(trial.owner)
        try:
            await self.database.write(insert(trials), vars(trial), durable=True)
        finally:
            self._arriving.discard(trial.owner)
        self._live[trial.id] = trial
        return trial

    async def end_trial(self, trial: Trial, reason: str) -> Trial:
        """Begin the end of a trial. Only the first call counts."""
        now = self._live.get(trial.id)
        if now is None or now.state == "ending":
            return now or trial
        ended = await self._change(trial, state="ending", reason=reason)
        self._log.info("trial_ends", trial=trial.id, owner=trial.owner, reason=reason)
        await self._remove_key(trial)
        return ended

    async def set_closed(self, closed: bool) -> None:
        """Close the playground, or open it. A closed one starts no trial. Running trials go on."""
        change = self.database.insert_or_replace(playground_closed)
        if closed:
            await self.database.write(change, {"at": self.clock(), "id": 1}, durable=True)
        else:
            await self.database.write(delete(playground_closed), durable=True)
        self.closed = closed

    def _check_open(self) -> None:
        if not self.settings.runs:
            raise PermissionDenied(
                "this gateway has no playground; an admin opens one with TANDEM_PLAYGROUND_RUNS"
            )
        if self.closed:
            raise PermissionDenied("the playground is closed for now; come back later")

    def check_project(self, project_id: str, key_id: str) -> None:
        """Raise `PermissionDenied` for the project of a trial, unless it is the key of the trial's
        program. So the project has the things of the trial alone."""
        key = self.keys.get(key_id)
        if project_id in self._live and (key is None or key.name != project_id):
            raise PermissionDenied(
                f"the project {project_id} is a trial's, and only the trial's program has sessions "
                "in it"
            )

    def _check_room(self, owner: str) -> None:
        if owner in self._arriving:
            raise Overloaded("your trial begins already; look at it", limit="trials")
        own = next((each for each in self.all() if each.owner == owner), None)
        if own is not None:
            place = self.place_of(own)
            where = f"number {place} in the queue" if place else own.state
            raise Overloaded(
                f"you have the trial {own.id} already, which is {where}; end it, or wait for its "
                "end",
                limit="trials",
                position=place,
                retry_after=_RETRY_AFTER,
            )
        if len(waiting(self.all())) >= MOST_WAITING:
            raise Overloaded(
                f"{MOST_WAITING} trials wait already; come back later",
                limit="trials",
                position=MOST_WAITING + 1,
                retry_after=_RETRY_AFTER,
            )

    # --- Requests of runners ------------------------------------------------------------------

    async def claim_trial(self) -> ClaimedTrial | None:
        """Give the next trial to a runner, None if nothing may start now."""
        self._asked_at = self.monotonic()
        async with self._claiming:
            trial = None if self.closed else next_trial(self.all(), runs=self.settings.runs)
            if trial is None:
                return None
            now, seconds = self.clock(), 60 * self.settings.minutes
            key, secret = await self.keys.create(
                NewKey(owner=trial.owner, role="ci", name=trial.id, expires_in=seconds)
            )
            self._heard[trial.id] = self.monotonic()
            if self._live.get(trial.id) is not trial:  # ended meanwhile
                await self.keys.remove(key.id)
                return None
            claimed = await self._change(
                trial,
                state="running",
                reason="",
                started_at=now,
                ends_at=now + seconds,
                attempt=trial.attempt + 1,
            )
            return ClaimedTrial(claimed, secret)

    def hear_runner(self, trial_id: str, attempt: int) -> bool:
        """Note that a runner lives. Return whether its attempt goes on."""
        trial = self._live.get(trial_id)
        if trial is None or (trial.state, trial.attempt) != ("running", attempt):
            return False
        self._heard[trial_id] = self.monotonic()
        return True

    async def finish_attempt(
        self,
        trial_id: str,
        attempt: int,
        *,
        error: str,
        numbers: Mapping[str, float],
        violations: Mapping[str, str],
        weights: str,
    ) -> None:
        """Note the result of an attempt. That of an earlier attempt changes nothing."""
        if not self.hear_runner(trial_id, attempt):
            return
        trial = self._live[trial_id]
        if error:
            await self.end_trial(trial, error)
            return
        await self._change(
            trial,
            state="open",
            numbers=dict(numbers),
            violations=dict(violations),
            weights=weights,
        )
        await self._remove_key(trial)

    # --- Periodic work ------------------------------------------------------------------------

    async def look_at_trials(self) -> None:
        """End trials whose time or tokens are used up, queue those of lost runners again, and
        remove the things of ending ones."""
        async with self._looking:
            self.used_tokens = await self._read_tokens()
            for trial_id in list(self._live):
                try:
                    await self._look_at(self._live[trial_id])  # only this loop removes one
                except StorageFailed:
                    raise
                except Exception:  # noqa: BLE001 - the other trials must end all the same
                    self._log.exception("trial_failed", trial=trial_id)

    async def _look_at(self, trial: Trial) -> None:
        if trial.state == "ending":
            await self._remove_things(trial)
        elif reason := self._why_over(trial):
            await self.end_trial(trial, reason)
        elif trial.state == "running" and self._silence(trial) > _SILENCE:
            await self._lose_runner(trial)

    def _why_over(self, trial: Trial) -> str:
        key = self.keys.get(trial.key_id)
        if key is None or self.keys.ended(key) is not None:
            revoked = key is not None and self.keys.ended(key) == "revoked"
            return f"the key of the visitor {'was revoked' if revoked else 'has ended'}"
        if key.role not in _VISITORS:
            return f"the role {key.role} of the visitor's key starts no trial"
        if trial.state == "waiting":
            over = self.clock() - trial.created_at > _LONGEST_WAIT
            return f"it has waited for {_LONGEST_WAIT / 3600:g} hours" if over else ""
        tokens = self.used_tokens.get(trial.id, 0)
        if trial.ends_at is not None and self.clock() >= trial.ends_at:
            return f"its time is over: {self.settings.minutes:g} minutes"
        if tokens >= self.settings.tokens:
            return f"its budget is used up: {tokens} of {self.settings.tokens} tokens"
        return ""

    def _silence(self, trial: Trial) -> float:
        """Return the seconds since a running trial's runner was heard."""
        return self.monotonic() - self._heard[trial.id]

    async def _lose_runner(self, trial: Trial) -> None:
        lost = f"its runner was silent for {_SILENCE:g} s"
        if trial.attempt >= _MOST_ATTEMPTS:
            await self.end_trial(trial, f"{lost}, {_MOST_ATTEMPTS} times")
            return
        await self._remove_key(trial)
        if self._live[trial.id] is not trial:  # ended meanwhile
            return
        self._log.warning("trial_waits_again", trial=trial.id, reason=lost)
        # Before a runner may claim it again, whose sessions stay.
        self._end_sessions(trial, lost)
        await self._change(trial, state="waiting", reason=lost)

    def _end_sessions(self, trial: Trial, reason: str) -> bool:
        """Begin the ends of a trial's sessions. Return whether none is left."""
        left = [each for each in self.sessions.all() if each.project_id == trial.id]
        for session in left:
            self.end_session_soon(session.id, state="expired", reason="expired", detail=reason)
        return not left

    async def _remove_things(self, trial: Trial) -> None:
        await self._remove_key(trial)  # again, after a crash
        if not self._end_sessions(trial, trial.reason):
            return
        of_trial = select(runs.c.id, runs.c.state).where(runs.c.project_id == trial.id)
        rows = await self.database.read(of_trial)
        if any(row["state"] == "active" for row in rows):
            return
        for row in rows:
            async for page in self.checkpoints.of_run(row["id"]):
                for checkpoint in page:
                    await self.checkpoints.delete(checkpoint)
        await self._change(trial, state="ended", ended_at=self.clock())
        del self._live[trial.id]
        self._heard.pop(trial.id, None)

    async def _remove_key(self, trial: Trial) -> None:
        """Remove the keys of the trial's programs, which have its id as their name."""
        for key in self.keys.all():
            if key.name == trial.id:
                await self.keys.remove(key.id)

    async def _read_tokens(self) -> dict[str, int]:
        """Return the tokens of each trial: of its sessions, and of chats with its weights."""
        found = {each.id: each for each in self.all() if each.state in ("running", "open")}
        if not found:
            return {}
        since = min(each.created_at for each in found.values()) - HOUR  # an index has the hours
        tokens = usage.c.input_tokens - usage.c.cached_tokens + usage.c.output_tokens
        session, run = sessions.alias(), runs.alias()
        rows = await self.database.read(
            select(
                session.c.project_id.label("of_session"),
                run.c.project_id.label("of_run"),
                func.sum(tokens).label("tokens"),
            )
            .select_from(usage)
            .outerjoin(session, session.c.id == usage.c.session_id)
            .outerjoin(run, run.c.id == usage.c.run_id)
            .where(usage.c.hour >= since)
            .where(or_(session.c.project_id.in_(found), run.c.project_id.in_(found)))
            .group_by("of_session", "of_run")
        )
        used: Counter[str] = Counter()
        for row in rows:
            for trial_id in found.keys() & {row["of_session"], row["of_run"]}:
                used[trial_id] += int(row["tokens"])
        return used

    async def _change(self, trial: Trial, **values: object) -> Trial:
        """Change a trial in the table and in memory. Raises `StorageFailed` or `StorageFull`."""
        before = self._live[trial.id]
        changed = self._live[trial.id] = replace(before, **values)  # type: ignore[arg-type]
        try:
            await self.database.write(
                update(trials).where(trials.c.id == trial.id).values(**values), durable=True
            )
        except TandemError:
            if self._live.get(trial.id) is changed:
                self._live[trial.id] = before
            raise
        return changed


def unknown_trial(trial_id: str) -> UnknownTrial:
    return UnknownTrial(f"there is no trial {trial_id[:100]!r}, or it is another owner's")
