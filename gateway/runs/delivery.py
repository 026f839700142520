"""Sends a call to the run's trainer, and to its replacements, until it is answered."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from copy import deepcopy
from pathlib import Path

from gateway.owners.usage.meter import Subject
from gateway.owners.usage.time_shares import Signal
from gateway.runs.operations import Call, Kind, Operation, Progress, RunBroken
from gateway.runs.recovery.replay_log import SentCall
from gateway.runs.recovery.restoration import Reply, Request, TrainerRequest
from gateway.runs.tools import RunTools
from gateway.runs.trainer import RunTrainer
from gateway.runs.trainer_host import DevicesLost
from gateway.storage.data_directory import relative_path
from gateway.workers.clients import (
    EXIT_REPORT_PATIENCE,
    Method,
    TrainerClient,
    WorkerUnavailable,
)
from tandem.errors import InternalError, OperationTimedOut, TandemError, describe, from_failure
from tandem.telemetry import get_log
from tandem.v1 import common_pb2, trainer_pb2

_DELIVERIES = 3
"""Most sendings to a live trainer over breaking connections."""
_BREAKS = "the connection to the trainer broke again and again"
_PROGRESS_INTERVAL = 2.0
_SIGNALS: dict[Kind, Signal] = {
    "save_weights": "publish",
    "save_weights_for_sampler": "publish",
    "save_weights_external": "publish",
    "load_weights": "load",
}
"""The signals of the trainer's seconds, for operations that do not compute."""

Pick = Callable[[TrainerClient], Method[Request, Reply]]


class CallDelivery:
    def __init__(self, *, trainer: RunTrainer, tools: RunTools) -> None:
        self._run = run = trainer.run
        self._trainer = trainer
        self._tools = tools
        self._subject = Subject(
            id=run.id,
            session_id=run.session_id,
            owner=run.owner,
            base_model=run.model.name,
            run_id=run.id,
        )
        self._without_turn: dict[int, asyncio.Event | None] = {}
        """By `seq_id`: operations waiting for a turn. A later operation waits for the event."""
        self._log = get_log(session_id=run.session_id, run_id=run.id)

    async def deliver(
        self,
        call: Call,
        pick: Pick[Request, Reply],
        request: Request,
        *,
        release: Callable[[], None] | None = None,
    ) -> Reply:
        """Call the trainer. Raises the trainer's failure or `RunBroken`.

        After a broken connection the request is repeated, and the trainer answers an applied one
        from memory. A lost trainer's replacement gets the request. `release` is called when no
        replay can need the call."""
        operation = call.operation
        request.header.CopyFrom(
            common_pb2.OperationHeader(
                operation_id=operation.future.request_id,
                session_id=self._run.session_id,
                run_id=self._run.id,
                # The trainer counts the run's creation, which may be a load, as 1. The client
                # counts from 1 after it.
                seq_id=operation.seq_id + 1,
                previous_seq_id=call.previous_seq_id + 1,
                gradients_incomplete=call.gradients_incomplete,
            )
        )
        if isinstance(request, trainer_pb2.OptimStepRequest):
            request.snapshot = await self._trainer.taker.folder()
        self._note_sent(call, request, release=release)
        call.send()
        reply = await self._answer(call, pick, request)
        call.answered = True
        age = time.monotonic() - operation.future.accepted_at
        signal = _SIGNALS.get(operation.kind, "compute")
        self._run.timeline.add(signal, seconds=min(reply.seconds, age))
        if isinstance(reply, trainer_pb2.PublishReply) and _is_early(reply, request):
            self._note_early(call, True)
        else:
            self._note_answered(call, request, reply)
        self._tools.usage.record_reply(
            operation.usage_kind, self._subject, reply, ranks=self._run.about.ranks
        )
        if reply.HasField("failure"):
            call.failed = True
            raise from_failure(reply.failure)
        return reply

    async def until_durable(
        self, call: Call, request: trainer_pb2.PublishRequest, reply: trainer_pb2.PublishReply
    ) -> trainer_pb2.PublishReply:
        """Wait until the version of an early publish survives a power failure. Return its reply.

        A trainer that dies meanwhile is replaced, and the replacement publishes again, unless it
        finds the files. Raises the trainer's failure, `OperationTimedOut` or `RunBroken`."""
        if not _is_early(reply, request):
            return reply
        try:
            reply = await self._durable(call, request, reply)
        except TandemError as error:
            reply = trainer_pb2.PublishReply(failure=error.to_failure())
        self._note_answered(call, request, reply)
        if reply.HasField("failure"):
            raise from_failure(reply.failure)
        return reply

    async def _durable(
        self, call: Call, request: trainer_pb2.PublishRequest, reply: trainer_pb2.PublishReply
    ) -> trainer_pb2.PublishReply:
        broken = 0
        while True:
            self._note_early(call, _is_early(reply, request))
            if not _is_early(reply, request):
                return reply
            try:
                if not call.gone.done():
                    reply = await self._trainer.serving.await_published(request)
                    continue
            except OperationTimedOut:  # a disk stands still
                raise
            except (WorkerUnavailable, TandemError) as error:
                self._log.warning("connection_broke", attempt=broken, reason=describe(error))
                await asyncio.wait({call.gone}, timeout=EXIT_REPORT_PATIENCE)
                broken += 1
                if not call.gone.done() and broken >= _DELIVERIES:
                    self._trainer.lose(self._trainer.serving, InternalError(_BREAKS))
            if call.gone.done():
                self._note_early(call, False)
                request.handoff = False  # the engine reads the files
                reply = await self._answer(call, lambda one: one.stub.Publish, request)

    def _note_early(self, call: Call, early: bool) -> None:
        log = self._run.log
        if log is not None and (sent := log.held(call.operation.seq_id)) is not None:
            sent.is_early = early

    async def _answer(self, call: Call, pick: Pick[Request, Reply], request: Request) -> Reply:
        while True:
            async with self._turn(call.operation) as client:
                if reply := await self._answer_of(client, call, pick(client), request):
                    return reply
            if isinstance(request, trainer_pb2.OptimStepRequest):
                request.snapshot = ""

    async def _answer_of(
        self, client: TrainerClient, call: Call, method: Method[Request, Reply], request: Request
    ) -> Reply | None:
        gone, broken = self._trainer.gone, 0
        self._trainer.restoration.tell_incomplete(request.header)
        while not gone.done():
            if isinstance(request, trainer_pb2.ForwardBackwardRequest):
                self._trainer.restoration.limit(call.operation.seq_id, request)
            try:
                with self.following(call, client):
                    reply = await client.call(method, request, begun=call.begun)
                # Answers count in order. A replay sends earlier calls first.
                if not call.begun.done():
                    await asyncio.wait({call.begun, gone}, return_when=asyncio.FIRST_COMPLETED)
                if call.begun.done():
                    call.gone = gone
                    return reply
            except WorkerUnavailable as error:
                self._log.warning("connection_broke", attempt=broken, reason=str(error))
                await asyncio.wait({gone}, timeout=EXIT_REPORT_PATIENCE)
                broken += 1
                if not gone.done() and broken >= _DELIVERIES:
                    self._trainer.lose(client, InternalError(_BREAKS))
            except OperationTimedOut as error:
                if not self._is_silent:
                    if not self._run.host.was_at(self._run.id):  # it worked on another run's call
                        continue
                    # A repetition would take as long.
                    raise RunBroken(await self._trainer.final(error)) from error
                self._trainer.lose(client, error)
            except TandemError as error:
                self._trainer.lose(client, error)
        return None

    @property
    def _is_silent(self) -> bool:
        """Whether the trainer ignores heartbeats and can be restored."""
        host = self._run.host
        return self._run.log is not None and (host.worker is None or bool(host.silence))

    @asynccontextmanager
    async def _turn(self, operation: Operation) -> AsyncIterator[TrainerClient]:
        """Hold a serving trainer with its devices for the block. Raises `RunBroken`.

        Operations get their turns in order. Otherwise one could hold the devices while its
        predecessor waits for them."""
        seq_id = operation.seq_id
        self._without_turn[seq_id] = None
        try:
            while True:
                await self._trainer.client()
                if (first := min(self._without_turn)) < seq_id:
                    before = self._without_turn[first] or asyncio.Event()
                    self._without_turn[first] = before
                    await before.wait()
                    continue
                try:
                    async with self._run.host.turn(self._run.id, operation.kind):
                        if self._trainer.serves:  # it may have died meanwhile
                            self._let_next_go(seq_id)
                            yield self._trainer.serving
                            return
                except DevicesLost:
                    continue
        finally:
            self._let_next_go(seq_id)

    def _let_next_go(self, seq_id: int) -> None:
        if (waited_for := self._without_turn.pop(seq_id, None)) is not None:
            waited_for.set()

    def _note_sent(
        self, call: Call, request: TrainerRequest, *, release: Callable[[], None] | None
    ) -> None:
        """Note a call before its sending, for a replay."""
        log = self._run.log
        if log is None:
            if release is not None:
                release()
            return
        operation, again = call.operation, deepcopy(request)
        match again:
            case trainer_pb2.OptimStepRequest():
                again.snapshot = ""
            case trainer_pb2.ForwardBackwardRequest():
                again.loss_definition = b""
            case trainer_pb2.LoadCheckpointRequest():
                again.path = relative_path(Path(again.path), self._tools.settings.data_dir)
        content = again.SerializeToString()
        sent = SentCall(
            seq_id=operation.seq_id,
            kind=operation.kind,
            request=content,
            body=operation.body,
            size=len(content) + (operation.size if operation.has_payload else 0),
            has_payload=operation.has_payload,
            release=release,
        )
        was_complete = log.complete
        log.note_sent(sent)
        if was_complete and not log.complete:
            self._log.warning("not_restorable", reason=log.why_incomplete)

    def _note_answered(self, call: Call, request: Request, reply: Reply) -> None:
        """Note the trainer's answer and wait for its snapshot."""
        if (log := self._run.log) is not None:
            seq_id, failure = call.operation.seq_id, reply.failure
            self._trainer.restoration.note_plan(seq_id, reply)
            log.note_answered(
                seq_id, seconds=reply.seconds, failure=failure.type, reason=failure.message
            )
        if isinstance(request, trainer_pb2.OptimStepRequest) and request.snapshot:
            if not reply.HasField("failure") and self._trainer.serves:
                self._trainer.taker.follow(self._trainer.serving, request.snapshot)
            else:
                self._run.snapshot_asked = ""

    @contextmanager
    def following(self, call: Call, client: TrainerClient) -> Iterator[None]:
        """Update the call's progress during the block. Short calls are not asked."""
        tasks: list[asyncio.Task[None]] = []
        timer = asyncio.get_running_loop().call_later(
            _PROGRESS_INTERVAL,
            lambda: tasks.append(asyncio.create_task(self._follow(call, client))),
        )
        try:
            yield
        finally:
            timer.cancel()
            for task in tasks:
                task.cancel()

    async def _follow(self, call: Call, client: TrainerClient) -> None:
        await asyncio.wait({call.begun})
        while True:
            await asyncio.sleep(_PROGRESS_INTERVAL)
            try:
                reply = await client.progress()
            except (WorkerUnavailable, TandemError) as error:  # the call reports the error
                self._log.debug("no_progress", reason=describe(error))
                continue
            if reply.seq_id == call.operation.seq_id + 1:
                call.progress = Progress(
                    seconds=reply.seconds,
                    tokens_done=reply.tokens_done,
                    tokens=reply.tokens,
                    compiling=reply.compiling,
                )


def _is_early(reply: trainer_pb2.PublishReply, request: TrainerRequest) -> bool:
    """Return whether the version is there, but may not survive a power failure."""
    early = isinstance(request, trainer_pb2.PublishRequest) and request.early
    return early and not reply.durable and not reply.HasField("failure")
