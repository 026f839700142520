"""Changes a sampling session."""

from __future__ import annotations

from gateway.api.bounds import BoundFields, check_may_bound
from gateway.api.dependencies import AccessDep
from gateway.api.fields import Answer, PathText
from gateway.api.routing import Router
from gateway.sampling.bounds import Bounds
from gateway.sampling.sessions import SamplingUpdates
from tandem.errors import SessionFinished, StorageFailed, UnknownSampler

router = Router("/api/tandem/v1", tag="Tandem")


class SamplingSessionChange(BoundFields):
    """A missing field stays as it is, and null clears it. `updates` says what newer weights of the
    run do to running samples: these end first (`wait`), continue with them (`keep`), or end at once
    with their tokens and the stop reason `length` (`abort`). Samples of the last two kinds without
    a token are drawn from the newer weights."""

    updates: SamplingUpdates | None = None


class SamplingSessionInfo(Answer):
    sampling_session_id: str
    base_model: str
    weight_version: str
    min_version: int | None
    max_staleness: int | None
    updates: SamplingUpdates | None


@router.operation(
    "PATCH",
    "/sampling_sessions/{sampler_id}",
    role="ci",
    audit="sampler_change",
    errors=[UnknownSampler, SessionFinished, StorageFailed],
    rules=["Only the weights of the caller's own runs can be bounded, and no base model."],
)
async def change_sampling_session(
    sampler_id: PathText, body: SamplingSessionChange, access: AccessDep
) -> SamplingSessionInfo:
    """Bound the weights that may answer a sampling session, also its waiting samples, or choose the
    updates of later samples. A sample whose weights are older is refused with 412 `stale_version`,
    which the SDK does not repeat."""
    session = await access.sampling_session(sampler_id)
    given = {name: getattr(body, name) for name in body.model_fields_set}
    updates = given.get("updates", session.updates)
    bounds = Bounds(
        given.get("min_version", session.min_version),
        given.get("max_staleness", session.max_staleness),
    )
    gateway = access.gateway
    owner = gateway.sessions.require(session.session_id).owner
    await check_may_bound(gateway, session.version, bounds, owner=owner)
    await gateway.sampling.change(session, bounds, updates)
    access.audit.note(session.id, **{name: str(value) for name, value in given.items()})
    return SamplingSessionInfo.of(
        session, sampling_session_id=session.id, weight_version=session.version.name
    )
