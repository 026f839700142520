"""The planned end of a run: somebody stops it, its budget is used up, or its deadline has passed.

All three take one path. The decision is in the run's row first, with its error, and the next
gateway completes it. Operations at the trainer end, queued ones fail with the error. Then the
trainer saves the checkpoint `stopped-STEP`, and the run ends."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

from sqlalchemy import RowMapping, Update, select, update
from sqlalchemy.exc import IntegrityError

from gateway.identifiers import CheckpointPath
from gateway.runs.operations import Call, Operation, RunBroken, SaveWeights
from gateway.runs.recovery.snapshots import KEEPING_PATIENCE, REPEAT_AFTER
from gateway.runs.run import LAST_SEQ_ID, Run, RunEnding
from gateway.runs.runner import OperationRunner
from gateway.runs.tools import RunTools
from gateway.runs.trainer import RunTrainer
from gateway.storage.database import Database
from gateway.storage.futures.table import digest_of
from gateway.storage.tables import operations, runs
from tandem.errors import PLANNED_ENDS, StorageFailed, TandemError, from_type
from tandem.telemetry import get_log

_PREFIX = "stopped"
_DISCARD, _SAVE = "discard", "save"


def decision(run: Run, ending: RunEnding) -> Update:
    """Return the statement that writes a decision into the row of a run."""
    return (
        update(runs)
        .where(runs.c.id == run.id, runs.c.state == "active")
        .values(
            ending=_DISCARD if ending.discard else _SAVE,
            error_type=ending.error.type,
            reason=ending.error.message,
        )
    )


def ending_of(row: RowMapping) -> RunEnding | None:
    """Return an earlier gateway's decision about an active run, if any."""
    if not row["ending"]:
        return None
    return RunEnding(from_type(row["error_type"], row["reason"]), discard=row["ending"] == _DISCARD)


async def left_to_do(database: Database, row: RowMapping, ending: RunEnding) -> TandemError | None:
    """Return the error with which a run of an earlier gateway ends at once, or None if its trainer
    has to save a checkpoint first."""
    wanted = operations.c.seq_id.in_([0, LAST_SEQ_ID])
    found = {
        each["seq_id"]: each
        for each in await database.read(
            select(operations).where(operations.c.run_id == row["id"], wanted)
        )
    }
    last = found.get(LAST_SEQ_ID)
    if last is not None and last["state"] == "done":
        name = SaveWeights.model_validate_json(last["request"]).path
        path = CheckpointPath(run_id=row["id"], kind="weights", name=name)
        return with_checkpoint(ending.error, str(path))
    if last is not None and last["state"] == "failed":
        found_error = from_type(last["error_type"], last["error"])
        if isinstance(found_error, PLANNED_ENDS):  # the error with which the run ended
            return found_error
        return without_checkpoint(ending.error, last["error"])
    # Retention removes the creation only after a later operation.
    created = found.get(0) is None or found[0]["state"] == "done"
    return None if created and not ending.discard else ending.error


def with_checkpoint(error: TandemError, path: str) -> TandemError:
    return type(error)(f"{error.message}; its state is {path}")


def without_checkpoint(error: TandemError, why: str) -> TandemError:
    return type(error)(f"{error.message}; no checkpoint was saved at its end: {why}")


async def finish(trainer: RunTrainer, tools: RunTools, *, patience: float) -> TandemError:
    """Carry out the decision about a run, and return the error that ends it.

    After `patience` seconds, or if the save fails, the newest snapshot becomes the checkpoint.
    While the storage fails, both are tried again. `run.last_save` stays unfinished after a failure,
    so that the next gateway saves again until the end of the run is written."""
    run = trainer.run
    assert run.ending is not None
    error, discard = run.ending.error, run.ending.discard
    until = time.monotonic() + patience
    try:
        async with asyncio.timeout(patience):
            await run.dispatcher.drain()
            if discard:
                await run.dispatcher.until_recorded()
                return error
            return with_checkpoint(error, await _save(trainer, tools, until=until))
    except TimeoutError:
        why = f"its trainer did not save it within {patience:g} s"
    except RunBroken as broken:
        why = broken.error.message
    except TandemError as failure:
        why = failure.message
    except Exception as fault:  # noqa: BLE001 - the snapshot is kept all the same
        get_log().exception("end_failed", run_id=run.id)
        why = f"{type(fault).__name__} in the gateway; see its log"
    if discard:
        return error
    get_log().warning("not_saved_at_end", run_id=run.id, reason=why)
    if run.log is not None and run.log.newest.folder:
        left = max(KEEPING_PATIENCE, until - time.monotonic())
        kept = await tools.snapshots.keep(run, run.log.newest, prefix=_PREFIX, patience=left)
        if kept is not None:
            return type(error)(f"{error.message}; its newest snapshot is {kept}, because {why}")
    return without_checkpoint(error, why)


async def _save(trainer: RunTrainer, tools: RunTools, *, until: float) -> str:
    """Let the trainer save its state, and return the checkpoint's path. Repeat it until this time
    while the gateway's storage fails. Raises `RunBroken`, or the `TandemError` of the save."""
    run = trainer.run
    await trainer.client()  # the step is known only then
    operation = run.last_save
    while True:
        call = None
        try:
            operation = operation or await _new_save(run, tools)
            if run.last_save is None:
                await _accept(operation, tools)
                run.last_save = operation
            call = Call(operation, previous_seq_id=run.dispatcher.sent)
            call.begin()
            outcome = await OperationRunner(trainer=trainer, tools=tools).carry_out(call)
        except StorageFailed as failure:
            # A trainer repeats its own failure.
            if (call is not None and call.failed) or time.monotonic() + REPEAT_AFTER > until:
                raise
            get_log().warning("save_at_end_repeated", run_id=run.id, reason=failure.message)
        else:
            tools.journal.end(operation, outcome)
            return str(operation.checkpoint)
        if operation is not None:
            operation = replace(operation, resumed=True)  # the failed write may be in the database
        await asyncio.sleep(REPEAT_AFTER)


async def _new_save(run: Run, tools: RunTools) -> Operation:
    path = await tools.checkpoints.free_state_path(run.id, f"{_PREFIX}-{run.step}")
    body = SaveWeights(path=path.name)
    return Operation(
        run_id=run.id,
        seq_id=LAST_SEQ_ID,
        kind="save_weights",
        future=run.new_future(LAST_SEQ_ID),
        body=body,
        digest=digest_of("save_weights", body.model_dump_json().encode()),
    )


async def _accept(operation: Operation, tools: RunTools) -> None:
    """Write the save into the journal, so that the next gateway finds its files, and pin them until
    the save has ended."""
    try:
        await tools.journal.accept(operation, payload=None)
    except IntegrityError:  # an earlier try was committed
        await tools.journal.take_back(operation, payload=None)
    pins, folder = tools.checkpoints.pins, operation.folder
    pins.pin(folder)
    operation.future.on_end(lambda _outcome: pins.unpin(folder))
