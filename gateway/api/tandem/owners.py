"""The limits and budgets of owners: admins change them, owners read their own."""

from __future__ import annotations

from collections import Counter
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, Strict, StrictBool

from gateway.api.dependencies import Access, AccessDep
from gateway.api.fields import Answer, PathText, Time, WholeNumber
from gateway.api.routing import Router
from gateway.owners.budgets import HOUR, OWN_LIMITS
from tandem.errors import UnknownOwner

router = Router("/api/tandem/v1", tag="Tandem")

_Hours = Annotated[float, Strict(), Field(ge=0, le=1e9, allow_inf_nan=False)]


class OwnerChange(BaseModel):
    """Absent fields stay. Null removes an owner's own limit or budget. With `anew`, the budget
    counts from now on."""

    model_config = ConfigDict(extra="forbid")

    sessions: WholeNumber | None = None
    runs: WholeNumber | None = None
    samplers: WholeNumber | None = None
    checkpoint_bytes: WholeNumber | None = None
    device_hours: _Hours | None = None
    tokens: WholeNumber | None = None
    anew: StrictBool = False


class OwnedCounts(Answer):
    """Sessions that are active, runs that have not ended, engines, and bytes of checkpoints."""

    sessions: int
    runs: int
    samplers: int
    checkpoint_bytes: int


class OwnerBudget(Answer):
    """A null budget does not bound. Tokens are trained, computed prompt and sampled tokens. The
    used amounts count since `since`."""

    device_hours: float | None
    tokens: int | None
    since: Time
    used_device_hours: float
    used_tokens: int
    exhausted: bool


class OwnerInfo(Answer):
    """`own` names the limits that are not the settings'."""

    owner: str
    limits: OwnedCounts
    own: list[str]
    used: OwnedCounts
    budget: OwnerBudget | None


class OwnerList(Answer):
    owners: list[OwnerInfo]


@router.operation("GET", "/owners", role="reader", overseen=True)
async def list_owners(access: AccessDep) -> OwnerList:
    """List the owners with their limits and budgets. Admins and maintainers see everybody,
    others themselves."""
    stored = await _stored(access)
    return OwnerList(owners=[_described(access, name, stored) for name in _known(access)])


@router.operation("GET", "/owners/{name}", role="reader", overseen=True, errors=[UnknownOwner])
async def get_owner(name: PathText, access: AccessDep) -> OwnerInfo:
    """Return an owner's limits and budget."""
    _check_known(access, name)
    return _described(access, name, await _stored(access))


@router.operation(
    "PATCH", "/owners/{name}", role="admin", audit="owner_change", errors=[UnknownOwner]
)
async def change_owner(name: PathText, body: OwnerChange, access: AccessDep) -> OwnerInfo:
    """Change an owner's limits and budget, from now on.

    A used-up budget ends the owner's runs after their running operations, each with a checkpoint.
    New runs and samples are refused with `budget_exhausted`."""
    _check_known(access, name)
    gateway = access.gateway
    changes = body.model_dump(exclude_unset=True, exclude={"anew"})
    access.audit.note(name, **{field: str(value) for field, value in changes.items()})
    if "device_hours" in changes:
        hours = changes.pop("device_hours")
        changes["device_seconds"] = None if hours is None else hours * HOUR
    gateway.usage.write()
    await gateway.budgets.change(name, changes, anew=body.anew)
    return _described(access, name, await _stored(access))


def _known(access: Access) -> list[str]:
    """Return the owners with a key, a session or limits that the caller may see."""
    gateway = access.gateway
    found = {key.owner for key in gateway.keys.all()} | gateway.budgets.names()
    found |= {session.owner for session in gateway.sessions.all()}
    return sorted(name for name in found | {access.caller.owner} if access.caller.may_see(name))


def _check_known(access: Access, name: str) -> None:
    if name not in _known(access):
        raise UnknownOwner(
            f"there is no owner {name[:100]!r}; `tandem owners list` shows them. The first key of "
            "an owner makes it known (`tandem keys create --owner NAME`)"
        )


async def _stored(access: Access) -> Counter[str]:
    """Return the bytes of checkpoints by owner."""
    stored: Counter[str] = Counter()
    for each in await access.gateway.checkpoints.storage_use(access.caller, project_id=None):
        stored[each.owner] += each.bytes
    return stored


def _described(access: Access, name: str, stored: Counter[str]) -> OwnerInfo:
    gateway = access.gateway
    limits, used = gateway.budgets.limits_of(name), gateway.budgets.used(name)
    runs = [run for run in gateway.runs.all() if run.owner == name and run.state != "ended"]
    samplers = [each for each in gateway.samplers.all() if each.owner == name]
    budget = None
    if limits.has_budget:
        seconds = limits.device_seconds
        budget = OwnerBudget(
            device_hours=None if seconds is None else seconds / HOUR,
            tokens=limits.tokens,
            since=limits.since,
            used_device_hours=used.device_seconds / HOUR,
            used_tokens=used.tokens,
            exhausted=limits.why_exhausted(used) is not None,
        )
    return OwnerInfo(
        owner=name,
        limits=OwnedCounts(**{what: gateway.limits.limit_of(what, name) for what in OWN_LIMITS}),
        own=sorted(limits.limits),
        used=OwnedCounts(
            sessions=sum(session.owner == name for session in gateway.sessions.all()),
            runs=len(runs),
            samplers=sum(len(each.engines) for each in samplers),
            checkpoint_bytes=stored[name] + gateway.checkpoints.snapshot_bytes[name],
        ),
        budget=budget,
    )
