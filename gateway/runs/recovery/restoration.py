"""Restores a new trainer from a snapshot and the calls after it."""

from __future__ import annotations

import sys
from collections import Counter
from typing import NoReturn, TypeVar

from gateway.owners.usage.meter import TrainerReply
from gateway.runs.operations import RunBroken
from gateway.runs.recovery.replay_log import VARIABLE_FAILURES, ReplayLog, SentCall, Snapshot
from gateway.runs.run import Run
from gateway.runs.tools import RunTools
from gateway.runs.trainer_host import DevicesLost
from gateway.workers.clients import Method, TrainerClient
from tandem.errors import InternalError, OutOfMemory, TandemError, WorkerDied, from_failure
from tandem.telemetry import get_log
from tandem.v1 import common_pb2, trainer_pb2

_MOST_DEATHS = 3

TrainerRequest = (
    trainer_pb2.ForwardBackwardRequest
    | trainer_pb2.OptimStepRequest
    | trainer_pb2.PublishRequest
    | trainer_pb2.SaveCheckpointRequest
    | trainer_pb2.LoadCheckpointRequest
)
Request = TypeVar("Request", bound=TrainerRequest)
Reply = TypeVar("Reply", bound=TrainerReply)


class Restoration:
    """Restores the trainers of one run, and remembers the operations that ended them."""

    def __init__(self, *, run: Run, tools: RunTools) -> None:
        self._run = run
        self._tools = tools
        self.at: SentCall | None = None
        self._untold = ""
        self._deaths: Counter[int] = Counter()
        self._too_large: dict[int, tuple[int, bool]] = {}
        """By `seq_id`: the smallest failed micro-batch in tokens, and whether the trainer may try
        that size again with checkpointed blocks."""
        self._unusable: set[str] = set()
        self._log = get_log(session_id=run.session_id, run_id=run.id)

    def limit(self, seq_id: int, request: trainer_pb2.ForwardBackwardRequest) -> None:
        """Tell the trainer the micro-batch size that ran out of memory at an operation, if any.

        If it did so twice, the trainer refuses the operation unless micro-batches can be smaller.
        """
        if seq_id in self._too_large:
            request.out_of_memory_at, request.checkpoint = self._too_large[seq_id]

    def note_plan(self, seq_id: int, reply: TrainerReply) -> None:
        """Note the micro-batch sizes of a batch, because a replay with equal sizes gives equal
        bits."""
        log = self._run.log
        if log is None or not isinstance(reply, trainer_pb2.ForwardBackwardReply):
            return
        self._too_large.pop(seq_id, None)
        if reply.micro_batch_tokens:
            self._run.about.micro_batch_tokens = reply.micro_batch_tokens
        if (call := log.held(seq_id)) is not None:
            call.request += trainer_pb2.ForwardBackwardRequest(
                micro_batch_tokens=reply.micro_batch_tokens,
                out_of_memory_at=reply.out_of_memory_at,
                checkpoint=not reply.HasField("failure"),
            ).SerializeToString()

    def note_death_at(self, call: SentCall, error: TandemError) -> None:
        """Note that the trainer died at a call. Raises `RunBroken` after too many deaths, or if it
        would repeat."""
        if isinstance(error, WorkerDied) and error.defect:
            raise RunBroken(error)
        if isinstance(error, OutOfMemory) and call.kind in ("forward", "forward_backward"):
            before, checkpointed = self._too_large.get(call.seq_id, (sys.maxsize, True))
            smaller = error.tokens < before
            self._too_large[call.seq_id] = min(error.tokens, before), smaller
            if smaller or checkpointed:  # retry in other ways until the trainer refuses
                return
        self._deaths[call.seq_id] += 1
        if self._deaths[call.seq_id] >= _MOST_DEATHS:
            raise RunBroken(
                WorkerDied(
                    f"the trainer died {_MOST_DEATHS} times at operation {call.seq_id}, a "
                    f"{call.kind}: {error.message}"
                )
            )

    def blame_no_snapshot(self) -> None:
        """Note that no snapshot caused the trainer's end."""
        self._unusable.clear()

    async def bring_back(self, client: TrainerClient, log: ReplayLog) -> int:
        """Restore a new trainer and return the number of replayed operations. It uses its devices
        for one call at a time, so that others get them in between. Raises `RunBroken` or the
        trainer's error."""
        run = self._run
        run.about = await client.describe()
        snapshot = await self._load_newest(client, log)
        calls, previous, incomplete = log.calls_after(snapshot), snapshot.seq_id, ""
        for done, call in enumerate(calls):
            run.restoring = (
                f"the trainer is being restored from step {snapshot.step}: {done} of {len(calls)} "
                "operations are replayed"
            )
            if not call.is_replayed:
                incomplete = call.leaves_incomplete or incomplete
                continue
            failure = await self._replay(client, call, previous, incomplete)
            if call.answered and failure.type != call.failure:
                _raise_different(call, failure)
            previous, incomplete = call.seq_id, ""
        self._untold = incomplete
        async with run.host.use():
            self._check(client)
            reply = await client.restore(
                trainer_pb2.RestoreRequest(
                    seq_id=log.answered_up_to(snapshot) + 1, weight_version=run.parent
                )
            )
        run.step = reply.step
        await self._remove_unusable(log)
        return len(calls)

    def tell_incomplete(self, header: common_pb2.OperationHeader) -> None:
        """Put the pending reason for incomplete gradients into the first call after a
        restoration."""
        header.gradients_incomplete = header.gradients_incomplete or self._untold
        self._untold = ""

    async def _replay(
        self, client: TrainerClient, call: SentCall, previous: int, incomplete: str
    ) -> common_pb2.Failure:
        """Send a call again, after the `seq_id` `previous`, and return its failure, empty for none.
        `incomplete` explains incomplete gradients, or is ""."""
        run = self._run

        async def send(method: Method[Request, Reply], request: Request) -> common_pb2.Failure:
            request.MergeFromString(call.request)
            header = request.header
            header.gradients_incomplete = header.gradients_incomplete or incomplete
            if isinstance(request, trainer_pb2.LoadCheckpointRequest):
                request.path = str(self._tools.settings.data_dir / request.path)
            if isinstance(request, trainer_pb2.ForwardBackwardRequest):
                self.limit(call.seq_id, request)
            header.previous_seq_id = previous + 1
            async with run.host.turn(run.id, call.kind):
                self._check(client)
                self.at = call
                reply = await client.replay(method, request)
                self.at = None
            self.note_plan(call.seq_id, reply)
            return reply.failure

        match call.kind:
            case "optim_step":
                return await send(client.stub.OptimStep, trainer_pb2.OptimStepRequest())
            case "load_weights":
                return await send(client.stub.LoadCheckpoint, trainer_pb2.LoadCheckpointRequest())
        payload = await self._tools.journal.read_payload(run.id, call.seq_id)
        definition = await self._tools.definition_of(call.body, session_id=run.session_id)
        return await send(
            client.forward_backward(payload),
            trainer_pb2.ForwardBackwardRequest(loss_definition=definition),
        )

    def _check(self, client: TrainerClient) -> None:
        if self._run.host.worker is not client.worker:
            raise DevicesLost("it ended while it waited for its devices")

    async def _load_newest(self, client: TrainerClient, log: ReplayLog) -> Snapshot:
        run = self._run
        if not log.complete:
            raise RunBroken(WorkerDied(f"the trainer died; {log.why_incomplete}"))
        for snapshot in log.snapshots:
            if not snapshot.folder:
                return snapshot  # the base model is loaded
            if snapshot.folder in self._unusable:
                continue
            run.restoring = f"the trainer is being restored: it loads step {snapshot.step}"
            async with run.host.use():
                self._check(client)
                self._unusable.add(snapshot.folder)  # if the trainer dies of it, the next is tried
                reply = await client.restore(
                    trainer_pb2.RestoreRequest(path=snapshot.folder, seq_id=snapshot.seq_id + 1)
                )
            if not reply.HasField("failure"):
                self._unusable.discard(snapshot.folder)
                return snapshot
            self._log.error("snapshot_unusable", step=snapshot.step, reason=reply.failure.message)
        raise RunBroken(WorkerDied("the trainer died, and none of its snapshots can be read"))

    async def _remove_unusable(self, log: ReplayLog) -> None:
        for snapshot in log.snapshots:
            if snapshot.folder in self._unusable:
                log.lose(snapshot)
                await self._tools.snapshots.remove_snapshot(self._run, snapshot)
        self._unusable.clear()


def _raise_different(call: SentCall, failure: common_pb2.Failure) -> NoReturn:
    """Raise the error of a call that ended differently: its failure if that may be temporary, else
    `RunBroken`."""
    if failure.type in VARIABLE_FAILURES:
        error = from_failure(failure)
        raise type(error)(
            f"operation {call.seq_id}, a {call.kind}, failed when it was replayed: {error.message}"
        )
    raise RunBroken(
        InternalError(
            f"operation {call.seq_id} ended differently when it was replayed: with "
            f"{failure.type or 'success'} instead of {call.failure or 'success'}"
        )
    )
