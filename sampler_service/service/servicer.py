"""The sampler's gRPC servicer."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path

import grpc
import grpc.aio

from sampler_service.engine import EngineDelta, EngineFacts, EngineState, SleepLevel
from sampler_service.lifecycle import SwitchReport
from sampler_service.metrics import SamplerMetrics
from sampler_service.scheduler import Scheduler
from sampler_service.service.parser_process import AnswerInProcess, ParserProcess
from sampler_service.service.request_parser import ParsedRequest, parse_request
from sampler_service.service.responses import StreamBuffer, encode_response, versions_of
from sampler_service.service.sample_stream import SampleQueue
from sampler_service.structured_output import CompiledGrammar, GrammarCompiler
from sampler_service.weights.loader import LoadableVersion
from sampler_service.work import Sampled, SampleJob, Updates
from tandem.errors import InternalError, InvalidRequest, TandemError
from tandem.protocol.fencing import CallRefused, Fence
from tandem.telemetry import get_log
from tandem.v1 import common_pb2, sampler_pb2, sampler_pb2_grpc
from tandem.wire.v1 import tinker_pb2

Context = grpc.aio.ServicerContext[object, object]
OnDeltas = Callable[[Sequence[EngineDelta], LoadableVersion], None]


class SamplerServicer(sampler_pb2_grpc.SamplerServicer):
    """Answers calls as soon as the port is bound. `ready` gives it the engine.

    Before that, calls end with UNAVAILABLE. A user's mistake or a failed operation becomes a
    `Failure` in the reply. `WorkerServer` checks the secret, and `fence` the lease."""

    _facts: EngineFacts
    _scheduler: Scheduler
    _grammars: GrammarCompiler
    _messages: ParserProcess

    def __init__(self, *, fence: Fence, timeout: float, metrics: SamplerMetrics) -> None:
        """`timeout` limits the wait for a stream's reader, in seconds."""
        self._fence = fence
        self._timeout = timeout
        self._metrics = metrics
        self._is_ready = False
        self._streams: set[SampleQueue] = set()
        self._numbers = count()
        self._log = get_log()

    def ready(
        self,
        facts: EngineFacts,
        scheduler: Scheduler,
        grammars: GrammarCompiler,
        messages: ParserProcess,
    ) -> None:
        self._facts, self._scheduler = facts, scheduler
        self._grammars, self._messages = grammars, messages
        self._is_ready = True

    def end(self) -> None:
        """End the sample streams once all requests are answered. Call it after the engine
        failed."""
        for stream in self._streams:
            stream.complete()

    async def Describe(
        self, request: sampler_pb2.DescribeSamplerRequest, context: Context
    ) -> sampler_pb2.DescribeSamplerReply:
        await self._check_ready(context)
        facts, status = self._facts, self._scheduler.status
        return sampler_pb2.DescribeSamplerReply(
            state=sampler_pb2.SamplerState.Value(f"SAMPLER_STATE_{status.state.name}"),
            version=_version_message(status.version),
            max_length=facts.max_length,
            running=status.running,
            waiting=status.waiting,
            queued=status.load.queued,
            kv_used=status.load.kv_used,
            max_lora_rank=facts.max_lora_rank,
            adapters=status.adapters,
        )

    async def Load(
        self, request: sampler_pb2.LoadRequest, context: Context
    ) -> sampler_pb2.LoadReply:
        await self._check_lease(context)
        try:
            version = _parse_version(request.version)
            if request.HasField("handoff"):
                version = replace(version, handoff=request.handoff)
            outcome = await asyncio.wrap_future(
                self._scheduler.load(version, in_flight=request.in_flight)
            )
        except TandemError as error:
            self._log.warning("load_refused", version=request.version.name, error=error.message)
            return sampler_pb2.LoadReply(
                failure=error.to_failure(), version=_version_message(self._scheduler.status.version)
            )
        return sampler_pb2.LoadReply(
            version=_version_message(outcome.version),
            bytes=outcome.bytes,
            seconds=outcome.seconds,
            canary_difference=outcome.canary_difference,
            handed_off=outcome.handed_off,
            handoff_failure=outcome.handoff_failure,
        )

    async def Sample(  # type: ignore[override]
        self,
        requests: AsyncIterator[sampler_pb2.SampleRequests],
        context: Context,
    ) -> None:
        await self._check_ready(context)
        stream = SampleQueue()
        self._streams.add(stream)
        reading = asyncio.create_task(self._read(requests, stream, context))
        reading.add_done_callback(lambda _: stream.complete())
        try:
            while batch := await stream.next_replies():
                await self._write(batch, context, give_up=reading.cancel)
            if reading.done():
                await reading
        except CallRefused as refused:
            await refused.abort(context)
        finally:
            reading.cancel()
            self._streams.remove(stream)
            stream.close()  # drops its requests from the engine

    async def _read(
        self,
        requests: AsyncIterator[sampler_pb2.SampleRequests],
        stream: SampleQueue,
        context: Context,
    ) -> None:
        """Hand requests to the engine. An error cancels all unanswered ones."""
        try:
            async for batch in requests:
                self._note_state()
                self._fence.require(context)
                for request in batch.requests:
                    self._begin(request, stream)
                for number in batch.cancelled:
                    stream.cancel(number)
        except BaseException:
            stream.close()
            raise

    def _begin(self, request: sampler_pb2.SampleRequest, stream: SampleQueue) -> None:
        # A grammar must be compiled, or an answer be parsed.
        if request.HasField("structured") or request.HasField("parse"):
            stream.expect_late(request.number, self._answer(request))
            return
        try:
            asked = self._parse(request)
            answer = self._submit(asked)
        except Exception as error:  # noqa: BLE001 - others' samples are on the stream, too
            stream.put(request.number, self._refused(request, error))
        else:
            stream.expect_result(request.number, answer, partial(self._reply, asked))

    async def SampleStream(  # type: ignore[override]
        self,
        request: sampler_pb2.SampleRequest,
        context: Context,
    ) -> None:
        """Write instead of yielding, so that a blocked write frees the engine in time."""
        await self._check_lease(context)
        copies = request.num_samples if request.params.temperature == 0 else 1
        buffer = StreamBuffer(topk=request.topk_sample_logprobs, copies=copies)
        answer = asyncio.create_task(self._answer(request, on_deltas=buffer.add_deltas))
        answer.add_done_callback(lambda _: buffer.close())
        answers: dict[int, AnswerInProcess] = {}
        try:
            while deltas := await buffer.next_deltas():
                if request.HasField("parse"):  # slow for a long or strange answer
                    await asyncio.to_thread(self._add_messages, request, deltas, answers)
                for delta in deltas:
                    event = sampler_pb2.SampleEvent(delta=delta)
                    await self._write(event, context, give_up=answer.cancel)
            event = sampler_pb2.SampleEvent(reply=await answer)
            await self._write(event, context, give_up=answer.cancel)
        finally:
            answer.cancel()  # also drops the request from the engine

    async def _write(
        self,
        event: sampler_pb2.SampleReplies | sampler_pb2.SampleEvent,
        context: Context,
        *,
        give_up: Callable[[], object],
    ) -> None:
        """Send a part of a stream. For a reader that does not read in time, call `give_up`, which
        frees the engine, and abort the call after the write. The write lasts until the reader reads
        or ends the call, because gRPC can end neither a write nor a call during a write."""
        late = asyncio.get_running_loop().call_later(self._timeout, give_up)
        try:
            await context.write(event)
        finally:
            late.cancel()
        if late.when() <= asyncio.get_running_loop().time():
            await context.abort(
                grpc.StatusCode.DEADLINE_EXCEEDED,
                f"the stream was not read for {self._timeout:g} s",
            )

    async def Sleep(
        self, request: common_pb2.SleepRequest, context: Context
    ) -> common_pb2.SwitchReply:
        return await self._switch(
            context, "asleep", lambda: self._scheduler.sleep(_parse_level(request.level))
        )

    async def Wake(
        self, request: common_pb2.WakeRequest, context: Context
    ) -> common_pb2.SwitchReply:
        def wake() -> Future[SwitchReport]:
            wanted = _parse_version(request.version) if request.HasField("version") else None
            return self._scheduler.wake(wanted)

        return await self._switch(context, "awake", wake)

    async def _switch(
        self,
        context: Context,
        event: str,
        begin: Callable[[], Future[SwitchReport]],
    ) -> common_pb2.SwitchReply:
        await self._check_ready(context)
        await self._fence.admit(context)
        try:
            switch = await asyncio.wrap_future(begin())
        except TandemError as error:
            return common_pb2.SwitchReply(failure=error.to_failure())
        self._log.info(
            event,
            device_bytes=switch.after.device,
            host_bytes=switch.after.host,
            **{f"{phase}_seconds": round(value, 4) for phase, value in switch.phases.items()},
        )
        return common_pb2.SwitchReply(
            seconds=switch.seconds,
            bytes_moved=switch.bytes_moved,
            device_bytes=switch.after.device,
            host_bytes=switch.after.host,
            version=_version_message(self._scheduler.status.version),
        )

    async def _answer(
        self, request: sampler_pb2.SampleRequest, *, on_deltas: OnDeltas | None = None
    ) -> sampler_pb2.SampleReply:
        """Return the reply to a request, which may be a failure."""
        try:
            asked = self._parse(request)
            if request.HasField("parse"):  # the first time takes seconds
                await asyncio.to_thread(self._messages.open_answer(request).check)
            grammar = None
            if asked.parsed.grammar is not None:
                grammar = await self._grammars.compile(asked.parsed.grammar)
            answer = self._submit(asked, grammar=grammar, on_deltas=on_deltas)
            await asyncio.wrap_future(answer)
            reply = self._reply(asked, answer)
            is_parsed = request.HasField("parse") and on_deltas is None
            if is_parsed and reply.HasField("response"):
                reply.response = await asyncio.to_thread(self._with_messages, request, reply)
        except Exception as error:  # noqa: BLE001 - as above
            return self._refused(request, error)
        return reply

    def _add_messages(
        self,
        request: sampler_pb2.SampleRequest,
        deltas: Sequence[sampler_pb2.SampleDelta],
        answers: dict[int, AnswerInProcess],
    ) -> None:
        for delta in deltas:
            if delta.index not in answers:
                answers[delta.index] = self._messages.open_answer(request)
            delta.tandem_message = answers[delta.index].push(
                array("i", delta.tokens), finished=delta.finished
            )

    def _with_messages(
        self, request: sampler_pb2.SampleRequest, reply: sampler_pb2.SampleReply
    ) -> bytes:
        response = tinker_pb2.SampleResponse.FromString(reply.response)
        for each in response.sequences:
            tokens = array("i", each.tokens)
            each.tandem_message = self._messages.open_answer(request).whole(tokens)
        return response.SerializeToString()

    def _parse(self, request: sampler_pb2.SampleRequest) -> _Asked:
        return _Asked(
            message=request,
            parsed=parse_request(request, self._facts),
            version=_parse_version(request.version),
            at=time.monotonic(),
        )

    def _submit(
        self,
        asked: _Asked,
        *,
        grammar: CompiledGrammar | None = None,
        on_deltas: OnDeltas | None = None,
    ) -> Future[Sampled]:
        request = asked.message
        return self._scheduler.submit(
            SampleJob(
                request=replace(
                    asked.parsed.request,
                    # A repeated operation may find its first call still running.
                    id=f"{request.operation_id}#{next(self._numbers)}",
                    grammar=grammar,
                    streamed=on_deltas is not None,
                ),
                version=asked.version,
                session_id=request.session_id,
                seq_id=request.seq_id,
                in_flight=request.in_flight,
                updates=Updates(request.updates),
                on_deltas=on_deltas,
            )
        )

    def _reply(self, asked: _Asked, answer: Future[Sampled]) -> sampler_pb2.SampleReply:
        request = asked.message
        try:
            sampled = answer.result()
            sampled_from = versions_of(sampled) if request.in_flight else []
            response = encode_response(
                sampled.result,
                version=sampled.version.name,
                versions=sampled_from,
                parsed=asked.parsed,
            )
        except Exception as error:  # noqa: BLE001 - as above
            return self._refused(request, error)
        prompt_tokens = len(request.prompt_tokens) // 4
        self._log.debug(
            "sampled",
            request_id=request.operation_id,
            session_id=request.session_id,
            version=sampled.version.name,
            seconds=round(sampled.seconds, 4),
        )
        return sampler_pb2.SampleReply(
            response=response,
            version=_version_message(sampled.version),
            prompt_tokens=prompt_tokens,
            sampled_tokens=self._metrics.answered(
                sampled.result,
                prompt_tokens=prompt_tokens,
                seconds=time.monotonic() - asked.at,
            ),
            cached_tokens=sampled.result.cached_tokens,
            seconds=sampled.seconds,
            max_length=self._facts.max_length,
            samples=[sampler_pb2.SampleVersions(runs=runs) for runs in sampled_from],
        )

    def _refused(
        self, request: sampler_pb2.SampleRequest, error: Exception
    ) -> sampler_pb2.SampleReply:
        if not isinstance(error, TandemError):
            self._log.error("sample_failed", request_id=request.operation_id, exc_info=error)
            error = InternalError(f"{type(error).__name__} in the sampler; see its log")
        self._metrics.refused(error.type)
        self._log.info(
            "sample_refused",
            request_id=request.operation_id,
            session_id=request.session_id,
            version=request.version.name,
            error_type=error.type,
            error=error.message,
        )
        return sampler_pb2.SampleReply(
            failure=error.to_failure(),
            version=request.version,
            max_length=self._facts.max_length,
        )

    async def _check_ready(self, context: Context) -> None:
        if not self._is_ready:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the engine is still starting")

    async def _check_lease(self, context: Context) -> None:
        """Abort a call that uses the device without the lease, or during sleep."""
        await self._check_ready(context)
        self._note_state()
        await self._fence.check(context)

    def _note_state(self) -> None:
        state = self._scheduler.status.state
        self._fence.asleep = state in (EngineState.ASLEEP, EngineState.WAKING)


@dataclass(frozen=True)
class _Asked:
    """A parsed request, and its arrival on the monotonic clock."""

    message: sampler_pb2.SampleRequest
    parsed: ParsedRequest
    version: LoadableVersion
    at: float


def _parse_version(message: common_pb2.WeightVersion) -> LoadableVersion:
    """Return the weight version that a message names. Raises `InvalidRequest`."""
    if not message.name or not message.path:
        raise InvalidRequest("the request lacks the name or the path of its weight version")
    return LoadableVersion(
        name=message.name,
        path=Path(message.path),
        run_id=message.run_id,
        step=message.step,
        adapter=message.adapter,
    )


def _parse_level(level: int) -> SleepLevel:
    """Return a sleep level. 0 means the first. Raises `InvalidRequest`."""
    if level not in (0, *SleepLevel):
        raise InvalidRequest(f"a sampler cannot sleep at level {level}; 1 and 2 are possible")
    return SleepLevel(level or SleepLevel.KEEP_WEIGHTS)


def _version_message(version: LoadableVersion) -> common_pb2.WeightVersion:
    return common_pb2.WeightVersion(
        name=version.name,
        path=str(version.path),
        run_id=version.run_id,
        step=version.step,
        adapter=version.adapter,
    )
