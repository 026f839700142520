"""The playground: blueprints for visitors, their trials, and the claims of runners."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Query, Response
from pydantic import BaseModel, Field, FiniteFloat, Strict, StrictBool

from gateway.api.dependencies import Access, AccessDep
from gateway.api.fields import Answer, Limit, Offset, PathText, Time, WholeNumber
from gateway.api.routing import Router
from gateway.playground.queue import Trial
from gateway.playground.trials import unknown_trial
from tandem.blueprints.description import Value, about_blueprint
from tandem.errors import (
    BudgetExhausted,
    InvalidField,
    Overloaded,
    PermissionDenied,
    StorageFailed,
    StorageFull,
    UnknownModel,
    UnknownTrial,
)

router = Router("/api/tandem/v1/playground", tag="Tandem")


class PlaygroundState(Answer):
    """`runs` trials train at once. Each ends after `minutes`, or `tokens`. An unusable blueprint
    has a `reason`."""

    open: bool
    runs: int
    minutes: float
    tokens: int
    waiting: int
    running: int
    blueprints: list[dict[str, Any]]


class PlaygroundChange(BaseModel):
    open: StrictBool


class StartTrial(BaseModel):
    """Absent values are the parameters' defaults."""

    blueprint: Annotated[str, Field(max_length=200)]
    model: Annotated[str, Field(max_length=200)]
    values: Annotated[dict[str, Value], Field(max_length=100)] = {}
    seed: WholeNumber = 0


class TrialInfo(Answer):
    """`state` is waiting, running, open, ending or ended. `queue_position` counts from 1, and is 0
    in no queue. Its runs have the `id` as their project."""

    id: str
    owner: str
    blueprint: str
    model: str
    values: dict[str, Value]
    seed: int
    state: str
    reason: str
    queue_position: int
    created_at: Time
    started_at: Time | None
    ends_at: Time | None
    ended_at: Time | None
    attempt: int
    numbers: dict[str, float]
    violations: dict[str, str]
    weights: str


class TrialInfos(Answer):
    trials: list[TrialInfo]


class TrialClaim(Answer):
    """`key` is a key of the trial's owner for the runner's sessions, whose project is the trial. It
    ends with the trial. Both are null if nothing may start now."""

    trial: TrialInfo | None
    key: str | None


class AttemptFacts(BaseModel):
    attempt: WholeNumber


class AttemptState(Answer):
    """The attempt is over unless it `goes_on`."""

    goes_on: bool


class AttemptEnd(AttemptFacts):
    """`error` is the reason of a program without numbers."""

    error: Annotated[str, Field(max_length=2000)] = ""
    numbers: Annotated[dict[str, Annotated[FiniteFloat, Strict()]], Field(max_length=1000)] = {}
    violations: Annotated[dict[str, str], Field(max_length=1000)] = {}
    weights: Annotated[str, Field(max_length=400)] = ""


@router.operation("GET", "", role="reader")
async def get_playground(access: AccessDep) -> PlaygroundState:
    """Describe the playground and its blueprints."""
    playground = access.gateway.playground
    found = await playground.blueprints()
    about = [about_blueprint(name, each) for name, each in sorted(found.items())]
    return PlaygroundState.of(
        playground.settings,
        open=bool(playground.settings.runs) and not playground.closed,
        waiting=playground.count_in("waiting"),
        running=playground.count_in("running"),
        blueprints=about,
    )


@router.operation("PUT", "", role="maintainer", audit="playground_change")
async def change_playground(body: PlaygroundChange, access: AccessDep) -> PlaygroundState:
    """Open or close the playground. A closed one starts no trial. Running trials go on."""
    access.audit.note("playground", open=str(body.open).lower())
    await access.gateway.playground.set_closed(not body.open)
    return await get_playground(access)


@router.operation(
    "POST",
    "/trials",
    role="member",
    audit="trial_start",
    errors=[
        InvalidField,
        UnknownModel,
        PermissionDenied,
        BudgetExhausted,
        Overloaded,
        StorageFailed,
        StorageFull,
    ],
    rules=["An owner has one trial. The refusal of a second one has its place in the queue."],
)
async def start_trial(body: StartTrial, access: AccessDep) -> TrialInfo:
    """Put a trial of a blueprint into the queue."""
    trial = await access.gateway.playground.start_trial(
        access.caller,
        blueprint=body.blueprint,
        model=body.model,
        values=body.values,
        seed=body.seed,
    )
    access.audit.note(trial.id, blueprint=trial.blueprint, base_model=trial.model)
    return trial_info(trial, access)


@router.operation("GET", "/trials", role="reader", overseen=True)
async def list_trials(
    access: AccessDep,
    limit: Annotated[Limit, Query()] = 20,
    offset: Annotated[Offset, Query()] = 0,
) -> TrialInfos:
    """Return a page of trials, newest first. Admins and maintainers see everybody's trials, others
    their own."""
    owner = None if access.caller.sees_all else access.caller.owner
    found = await access.gateway.playground.list_trials(owner, limit=limit, offset=offset)
    return TrialInfos(trials=[trial_info(each, access) for each in found])


@router.operation("GET", "/trials/{trial_id}", role="reader", overseen=True, errors=[UnknownTrial])
async def get_trial(trial_id: PathText, access: AccessDep) -> TrialInfo:
    """Describe a trial, even after its end."""
    return trial_info(await own_trial(trial_id, access), access)


@router.operation(
    "POST",
    "/trials/{trial_id}/end",
    role="member",
    overseen=True,
    audit="trial_end",
    errors=[UnknownTrial, StorageFailed],
)
async def end_trial(trial_id: PathText, access: AccessDep) -> TrialInfo:
    """End a trial, with its runs and their checkpoints."""
    trial = await own_trial(trial_id, access)
    ended = await access.gateway.playground.end_trial(trial, f"{access.caller.owner} ended it")
    return trial_info(ended, access)


@router.operation("POST", "/claims", role="admin", audit=None, errors=[StorageFailed, StorageFull])
async def claim_trial(access: AccessDep, response: Response) -> TrialClaim:
    """Give the next trial to a runner."""
    response.headers["Cache-Control"] = "no-store"
    claim = await access.gateway.playground.claim_trial()
    if claim is None:
        return TrialClaim(trial=None, key=None)
    return TrialClaim(trial=trial_info(claim.trial, access), key=claim.key)


@router.operation("POST", "/claims/{trial_id}", role="admin", audit=None)
async def keep_claim(trial_id: PathText, body: AttemptFacts, access: AccessDep) -> AttemptState:
    """Keep a runner's claim. A runner that is silent for 30 s loses it."""
    goes_on = access.gateway.playground.hear_runner(trial_id, body.attempt)
    return AttemptState(goes_on=goes_on)


@router.operation(
    "POST", "/claims/{trial_id}/end", role="admin", audit=None, errors=[StorageFailed]
)
async def end_claim(trial_id: PathText, body: AttemptEnd, access: AccessDep) -> AttemptState:
    """Note the result of an attempt. That of an earlier attempt changes nothing."""
    result = body.model_dump(exclude={"attempt"})
    await access.gateway.playground.finish_attempt(trial_id, body.attempt, **result)
    return AttemptState(goes_on=False)


async def own_trial(trial_id: str, access: Access) -> Trial:
    """Return a trial that the caller may see. Raises `UnknownTrial`."""
    trial = await access.gateway.playground.find_trial(trial_id)
    if not access.caller.may_see(trial.owner):
        raise unknown_trial(trial_id)
    return trial


def trial_info(trial: Trial, access: Access) -> TrialInfo:
    playground = access.gateway.playground
    return TrialInfo.of(
        trial,
        queue_position=playground.place_of(trial),
        reason="; ".join(filter(None, (trial.reason, playground.why_waits(trial)))),
    )
