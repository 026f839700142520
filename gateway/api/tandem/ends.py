"""Stops a run, for its owner, maintainers and admins."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, StrictBool

from gateway.api.dependencies import AccessDep
from gateway.api.fields import Answer, PathText
from gateway.api.routing import Router
from gateway.api.tandem.runs import own_run
from gateway.runs.run import RunEnding
from tandem.errors import RunStopped, StorageFailed, StorageFull, UnknownRun

LONG_POLL = 2.0
"""Most seconds that a request waits for the end of the run."""

router = Router("/api/tandem/v1", tag="Tandem")


class StopRun(BaseModel):
    discard: StrictBool = False


class StoppedRun(Answer):
    """`ending`: the running operation or the save goes on, so ask again. `already`: the end was
    decided before this request. `checkpoint` is the path of the run's newest checkpoint with the
    trainer's state, or null."""

    id: str
    state: Literal["ending", "ended"]
    reason: str
    already: bool
    checkpoint: str | None


@router.operation(
    "POST",
    "/runs/{run_id}/stop",
    role="member",
    overseen=True,
    audit="run_stop",
    errors=[UnknownRun, StorageFailed, StorageFull],
)
async def stop_run(run_id: PathText, body: StopRun, access: AccessDep) -> StoppedRun:
    """Stop a run, and free its trainer.

    Operations at the trainer end. Queued and later ones fail with `run_stopped`, which the SDK does
    not repeat. Then the trainer saves the checkpoint `stopped-STEP`, unless `discard` is set.
    Idempotent. A second request with `discard` does not wait for the save. A request waits for at
    most 2 s. With `storage_failed` or `storage_full` the run ends, but a restart may forget the
    decision, so ask again."""
    gateway = access.gateway
    found = await own_run(run_id, access)
    access.audit.note(run_id, discard=str(body.discard).lower())
    already = found.state != "active"
    run, job = gateway.runs.get(run_id), gateway.jobs.find_job(run_id)
    error = RunStopped(f"{access.caller.owner} has stopped the run")
    if job is not None:
        already = job.ending is not None
        gateway.jobs.end(job, error)
        await gateway.jobs.wait_for_end(job, timeout=LONG_POLL)
        await gateway.database.flush()
    elif run is not None:
        already = run.why_over is not None
        gateway.runs.lifecycle.end_as_planned(run, RunEnding(error, discard=body.discard))
        if not await gateway.database.flush():
            raise StorageFailed(
                f"the run {run_id} is ending, but the storage does not take the decision yet; ask "
                "again"
            )
        await gateway.database.sync()
        await gateway.runs.lifecycle.wait_for_ends([run], timeout=LONG_POLL)
    found = await own_run(run_id, access)
    last, over, reason = found.last_training, found.state == "ended", found.reason
    if run is not None and (why := run.why_over) is not None:  # the storage may be behind
        over, reason = run.error is not None, why.message
    return StoppedRun(
        id=run_id,
        state="ended" if over else "ending",
        reason=reason,
        already=already,
        checkpoint=str(last.path) if last is not None else None,
    )
