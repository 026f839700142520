"""The gRPC face of the sampler: which token is current, and what is answered."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import TypeVar

import grpc

from sampler_service.engine import EngineDelta, EngineFacts
from sampler_service.form_compiler import FormCompiler
from sampler_service.metrics import SamplerMetrics
from sampler_service.response import encode_response, version_message, version_of
from sampler_service.sampling import Question, parse_request
from sampler_service.scheduler import Scheduler
from sampler_service.streams import StreamBuffer
from sampler_service.work import Sampled, SampleJob
from tandem.errors import OperationTimedOut, TandemError
from tandem.telemetry import get_log
from tandem.v1 import sampler_pb2, sampler_pb2_grpc

_Request = TypeVar("_Request")
_Reply = TypeVar("_Reply")

_STATES = {
    "awake": sampler_pb2.SAMPLER_STATE_AWAKE,
    "loading": sampler_pb2.SAMPLER_STATE_LOADING,
    "failed": sampler_pb2.SAMPLER_STATE_FAILED,
}


@dataclass(frozen=True)
class Serving:
    """What there is once the engine is ready."""

    facts: EngineFacts
    scheduler: Scheduler
    forms: FormCompiler


class SamplerServicer(sampler_pb2_grpc.SamplerServicer):
    """Answers from the moment the port is bound; `ready` gives it the engine. Who may call is
    decided before (`tandem/worker_access.py`).

    Before it is ready a call ends with a gRPC status;
    a user's mistake is a `Failure` in the reply.
    """

    def __init__(self, *, timeout: float, metrics: SamplerMetrics) -> None:
        self._timeout = timeout
        self._metrics = metrics
        self._serving: Serving | None = None
        self._numbers = count()
        self._log = get_log()

    def ready(self, serving: Serving) -> None:
        self._serving = serving

    async def Describe(
        self,
        request: sampler_pb2.DescribeSamplerRequest,
        context: grpc.aio.ServicerContext[
            sampler_pb2.DescribeSamplerRequest, sampler_pb2.DescribeSamplerReply
        ],
    ) -> sampler_pb2.DescribeSamplerReply:
        serving = await self._admit(context)
        facts, status = serving.facts, serving.scheduler.status
        return sampler_pb2.DescribeSamplerReply(
            state=_STATES[status.state.value],
            version=version_message(status.version),
            vocabulary=facts.vocabulary,
            max_length=facts.max_length,
            dtype=facts.dtype,
            device=facts.device,
            engine=facts.name,
            running=status.running,
            waiting=status.waiting,
            max_lora_rank=facts.max_lora_rank,
            adapters=status.adapters,
        )

    async def Load(
        self,
        request: sampler_pb2.LoadRequest,
        context: grpc.aio.ServicerContext[sampler_pb2.LoadRequest, sampler_pb2.LoadReply],
    ) -> sampler_pb2.LoadReply:
        scheduler = (await self._admit(context)).scheduler
        try:
            version = version_of(request.version)
            future = asyncio.wrap_future(scheduler.load(version))
            outcome = await asyncio.wait_for(future, self._time_left(context))
        except TimeoutError:
            error: TandemError = OperationTimedOut(f"{request.version.name} was not loaded in time")
        except TandemError as raised:
            error = raised
        else:
            return sampler_pb2.LoadReply(
                version=version_message(version),
                bytes=outcome.bytes,
                seconds=outcome.seconds,
                canary_difference=outcome.canary_difference,
            )
        self._log.warning("load_refused", version=request.version.name, error=error.message)
        return sampler_pb2.LoadReply(
            failure=error.to_failure(), version=version_message(scheduler.status.version)
        )

    async def Sample(
        self,
        request: sampler_pb2.SampleRequest,
        context: grpc.aio.ServicerContext[sampler_pb2.SampleRequest, sampler_pb2.SampleReply],
    ) -> sampler_pb2.SampleReply:
        serving = await self._admit(context)
        try:
            question = parse_request(request, serving.facts)
        except TandemError as error:
            return self._refused(request, error)
        return await self._answer(request, question, serving, self._time_left(context))

    async def SampleStream(  # type: ignore[override]
        self,
        request: sampler_pb2.SampleRequest,
        context: grpc.aio.ServicerContext[sampler_pb2.SampleRequest, sampler_pb2.SampleEvent],
    ) -> None:
        """Writes instead of yielding, so that a write that blocks is under the deadline, too."""
        serving = await self._admit(context)
        timeout = self._time_left(context)
        try:
            question = parse_request(request, serving.facts)
        except TandemError as error:
            await context.write(sampler_pb2.SampleEvent(reply=self._refused(request, error)))
            return
        wanted = question.request
        copies = wanted.num_samples if wanted.distinct_samples == 1 else 1
        buffer = StreamBuffer(topk=wanted.topk, copies=copies)
        answer = asyncio.create_task(
            self._answer(request, question, serving, timeout, listener=buffer.add)
        )
        answer.add_done_callback(lambda _: buffer.close())
        try:
            async with asyncio.timeout(timeout):  # a reader may stop reading
                while deltas := await buffer.take():
                    for delta in deltas:
                        await context.write(sampler_pb2.SampleEvent(delta=delta))
                await context.write(sampler_pb2.SampleEvent(reply=await answer))
        except TimeoutError:
            await context.abort(
                grpc.StatusCode.DEADLINE_EXCEEDED, f"the stream was not read within {timeout:.0f} s"
            )
        finally:
            answer.cancel()  # which takes the request out of the engine, if it is there

    async def _answer(
        self,
        request: sampler_pb2.SampleRequest,
        question: Question,
        serving: Serving,
        timeout: float,
        *,
        listener: Callable[[Sequence[EngineDelta]], None] | None = None,
    ) -> sampler_pb2.SampleReply:
        """The reply to a request, or to what was wrong with it."""
        started = time.monotonic()
        try:
            wanted = question.request
            if question.form is not None:
                wanted = replace(wanted, form=await serving.forms.compile(question.form))
            # An operation that its caller sends again may meet its first call still running.
            wanted = replace(
                wanted,
                id=f"{wanted.id}#{next(self._numbers)}",
                streamed=listener is not None,
            )
            job = SampleJob(
                request=wanted,
                version=version_of(request.version),
                session_id=request.session_id,
                seq_id=request.seq_id,
                listener=listener,
            )
            sampled = await _sample(job, serving.scheduler, timeout)
        except TandemError as error:
            return self._refused(request, error)
        response = encode_response(sampled.result, version=sampled.version.name, question=question)
        prompt_tokens = len(request.prompt_tokens) // 4
        return sampler_pb2.SampleReply(
            response=response,
            version=version_message(sampled.version),
            prompt_tokens=prompt_tokens,
            sampled_tokens=self._metrics.answered(
                sampled.result,
                prompt_tokens=prompt_tokens,
                seconds=time.monotonic() - started,
            ),
            cached_tokens=sampled.result.cached_tokens,
            seconds=sampled.seconds,
        )

    def _refused(
        self, request: sampler_pb2.SampleRequest, error: TandemError
    ) -> sampler_pb2.SampleReply:
        self._metrics.refused(error.type)
        self._log.info(
            "sample_refused",
            request_id=request.operation_id,
            session_id=request.session_id,
            version=request.version.name,
            error_type=error.type,
            error=error.message,
        )
        return sampler_pb2.SampleReply(failure=error.to_failure(), version=request.version)

    async def _admit(self, context: grpc.aio.ServicerContext[_Request, _Reply]) -> Serving:
        """Abort the call while the engine is still starting."""
        if self._serving is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the engine is still starting")
        assert self._serving is not None
        return self._serving

    def _time_left(self, context: grpc.aio.ServicerContext[_Request, _Reply]) -> float:
        left = context.time_remaining()
        return self._timeout if left is None else min(self._timeout, float(left))


async def _sample(job: SampleJob, scheduler: Scheduler, timeout: float) -> Sampled:
    """One request through the scheduler; forgotten there if its caller goes or time is up."""
    future = asyncio.wrap_future(scheduler.submit(job))
    try:
        return await asyncio.wait_for(future, timeout)
    except asyncio.CancelledError:
        scheduler.cancel(job.request.id)
        raise
    except TimeoutError as error:
        scheduler.cancel(job.request.id)
        raise OperationTimedOut(f"no sample within {timeout:.0f} s") from error
