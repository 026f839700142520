"""gRPC calls to a sampler. All samples share one stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from itertools import count
from typing import TypeVar

from gateway.workers.clients import (
    WorkerUnavailable,
    call_worker,
    errors_translated,
)
from gateway.workers.worker import Worker
from tandem.errors import InternalError, OperationTimedOut, WorkerDied
from tandem.v1 import sampler_pb2, sampler_pb2_grpc

_SILENCE = 2
"""Timeouts of silence before a sampler is given up: a load and the next sample."""

_FULL = 64
"""Requests in a message that waits for no more of them."""

_DESCRIBE_TIMEOUT = 2.0

Answer = TypeVar("Answer", sampler_pb2.LoadReply, sampler_pb2.SampleReply)

Tell = Callable[[sampler_pb2.SampleDelta], Awaitable[None]]


class SamplerClient:
    """Raises as `TrainerClient`. A failed engine counts as a broken connection.

    The sampler bounds a sample by `timeout` seconds from its start in the engine. A call has no
    deadline, because a sample may wait for many others. `give_up` gets a sentence after `_SILENCE`
    timeouts without an answer."""

    def __init__(self, worker: Worker, *, timeout: float, give_up: Callable[[str], None]) -> None:
        self.worker = worker
        self._stub = sampler_pb2_grpc.SamplerStub(worker.channel)
        self._patience = _SILENCE * timeout
        self._give_up = give_up
        self._samples: SampleStream | None = None
        self._heard_at = 0.0
        self._telling = 0
        self._awaited: dict[asyncio.Timeout, float] = {}
        self._next_look: asyncio.TimerHandle | None = None

    async def describe(self) -> sampler_pb2.DescribeSamplerReply:
        request = sampler_pb2.DescribeSamplerRequest()
        return await call_worker(
            self.worker, self._stub.Describe, request, timeout=_DESCRIBE_TIMEOUT
        )

    async def load(self, request: sampler_pb2.LoadRequest) -> sampler_pb2.LoadReply:
        return await self._unless_silent(call_worker(self.worker, self._stub.Load, request))

    async def sample(
        self, request: sampler_pb2.SampleRequest, tell: Tell | None = None
    ) -> sampler_pb2.SampleReply:
        """Return the samples. `tell` receives tokens as they are drawn, and slows the reading."""
        answer = self._open_samples().send(request) if tell is None else self._told(request, tell)
        return await self._unless_silent(answer)

    def _open_samples(self) -> SampleStream:
        before = self._samples
        if before is None or before.ended or before.lease != self.worker.lease:
            if before is not None:
                before.end()
            self._samples = SampleStream(self.worker, self._stub)
        assert self._samples is not None
        return self._samples

    async def _told(
        self, request: sampler_pb2.SampleRequest, tell: Tell
    ) -> sampler_pb2.SampleReply:
        async with errors_translated(self.worker):
            stream = self._stub.SampleStream(request, metadata=self.worker.metadata)
            try:
                async for event in stream:
                    if event.HasField("reply"):
                        return event.reply
                    self._telling += 1
                    try:
                        await tell(event.delta)
                    finally:
                        self._telling -= 1
                        self._note_heard()
            finally:
                stream.cancel()  # does nothing after its end
            raise InternalError("the sampler ended a stream without an answer")

    async def _unless_silent(self, answer: Awaitable[Answer]) -> Answer:
        """Return the answer. Raises `OperationTimedOut` if the sampler answers no call for too
        long."""
        awaited = asyncio.timeout(None)  # ended by `_look`
        try:
            async with awaited:
                self._awaited[awaited] = asyncio.get_running_loop().time()
                self._watch()
                found = await answer
        except TimeoutError:
            if not awaited.expired():
                raise
            raise OperationTimedOut(self._silence) from None
        finally:
            self._awaited.pop(awaited, None)
            self._watch()
        self._note_heard()
        if found.failure.type == WorkerDied.type:
            raise WorkerUnavailable(found.failure.message)
        return found

    def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        if self._awaited and self._next_look is None:
            due = max(next(iter(self._awaited.values())), self._heard_at) + self._patience
            self._next_look = loop.call_at(due, self._look)
        elif not self._awaited and self._next_look is not None:
            self._next_look.cancel()
            self._next_look = None

    def _look(self) -> None:
        self._next_look = None
        now = asyncio.get_running_loop().time()
        if self._telling:  # the delay is not the sampler's
            self._note_heard()
        latest = now - self._patience
        due = [awaited for awaited, sent_at in self._awaited.items() if sent_at <= latest]
        if due and self._heard_at <= latest:
            self._give_up(self._silence)
            for awaited in due:
                del self._awaited[awaited]
                awaited.reschedule(now)
        self._watch()

    @property
    def _silence(self) -> str:
        return (
            f"the sampler has answered nothing for {self._patience:g} s, {_SILENCE} times "
            "TANDEM_OPERATION_TIMEOUT"
        )

    def _note_heard(self) -> None:
        self._heard_at = asyncio.get_running_loop().time()


class SampleStream:
    """One stream of requests and replies under one lease.

    Requests of one event loop turn, and of the next ones if each brings more, form one message.
    Single messages would cost more than all the rest. Cancelling an answer cancels its request. A
    break raises its error in all answers."""

    def __init__(self, worker: Worker, stub: sampler_pb2_grpc.SamplerAsyncStub) -> None:
        self.lease = worker.lease
        self.ended = False
        self._worker = worker
        self._numbers = count()
        self._awaited: dict[int, asyncio.Future[sampler_pb2.SampleReply]] = {}
        self._unsent = sampler_pb2.SampleRequests()
        self._changed = asyncio.Event()
        self._reading = asyncio.create_task(self._read(stub), name="samples")

    def send(self, request: sampler_pb2.SampleRequest) -> asyncio.Future[sampler_pb2.SampleReply]:
        number = next(self._numbers)
        sent = self._unsent.requests.add()
        sent.CopyFrom(request)
        sent.number = number
        answer = self._awaited[number] = asyncio.get_running_loop().create_future()
        answer.add_done_callback(partial(self._ended, number))
        self._changed.set()
        return answer

    def end(self) -> None:
        """Send no more requests. Earlier ones are still answered."""
        self.ended = True
        self._changed.set()

    def _ended(self, number: int, answer: asyncio.Future[sampler_pb2.SampleReply]) -> None:
        if self._awaited.pop(number, None) is not None and answer.cancelled():
            self._unsent.cancelled.append(number)
            self._changed.set()

    async def _batches(self) -> AsyncIterator[sampler_pb2.SampleRequests]:
        """Yield batches to send. gRPC asks for the next when it has taken one."""
        while not self.ended or self._unsent.ByteSize():
            await self._changed.wait()
            self._changed.clear()
            waiting = 0
            while waiting < len(self._unsent.requests) < _FULL:
                waiting = len(self._unsent.requests)
                await asyncio.sleep(0)
            batch, self._unsent = self._unsent, sampler_pb2.SampleRequests()
            if batch.requests or batch.cancelled:
                yield batch

    async def _read(self, stub: sampler_pb2_grpc.SamplerAsyncStub) -> None:
        try:
            async with errors_translated(self._worker):
                batches = stub.Sample(self._batches(), metadata=self._worker.metadata)
                async for batch in batches:
                    for reply in batch.replies:
                        answer = self._awaited.get(reply.number)
                        if answer is not None and not answer.done():
                            answer.set_result(reply)
            raise WorkerUnavailable("the sampler has ended the stream of samples")
        except Exception as error:  # noqa: BLE001 - all waiting calls must get the error
            self.ended = True
            for answer in [*self._awaited.values()]:
                if not answer.done():
                    answer.set_exception(error)
