"""Streams whose reader does not read, on a gRPC connection with a small window."""

from __future__ import annotations

from collections.abc import AsyncIterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import grpc.aio
import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from sampler_service.engine import EngineDelta, EngineFacts, EngineState, SampledTokens
from sampler_service.metrics import SamplerMetrics
from sampler_service.service.servicer import SamplerServicer
from sampler_service.work import Sampled, SampleJob
from tandem.protocol.fencing import Fence
from tandem.v1 import common_pb2, sampler_pb2, sampler_pb2_grpc
from tests.support.sampler_streams import NARROW
from tests.support.waiting import until

FACTS = EngineFacts(
    vocabulary=100,
    max_length=2**20,
    model_length=2**20,
    dtype="float32",
    device="cpu",
    name="x",
    end_tokens=(1,),
)
DEADLINE = 20.0
TOKENS = 2**20
"""Tokens of a message that no window takes."""


class UnendingSamples:
    """A scheduler whose samples never end. Streamed ones have `TOKENS` at once."""

    status = SimpleNamespace(state=EngineState.AWAKE)

    def __init__(self) -> None:
        self.answers: list[Future[Sampled]] = []

    def submit(self, job: SampleJob) -> Future[Sampled]:
        answer: Future[Sampled] = Future()
        self.answers.append(answer)
        if job.on_deltas is not None:
            tokens = SampledTokens(np.zeros(TOKENS, "<i4"), np.zeros(TOKENS, "<f4"), stopped=False)
            job.on_deltas([EngineDelta("sample", 0, tokens, finished=False)], job.version)
        return answer


class UnreadWorld:
    def __init__(self, stub: sampler_pb2_grpc.SamplerAsyncStub, scheduler: UnendingSamples) -> None:
        self.stub, self.scheduler = stub, scheduler

    async def until_given_up(self, samples: int) -> None:
        answers = self.scheduler.answers
        await until(lambda: len(answers) == samples and all(each.cancelled() for each in answers))


@pytest.fixture
async def world() -> AsyncIterator[UnreadWorld]:
    scheduler: Any = UnendingSamples()
    servicer = SamplerServicer(
        fence=Fence(0), timeout=0.2, metrics=SamplerMetrics(CollectorRegistry())
    )
    servicer.ready(FACTS, scheduler, grammars=scheduler, messages=scheduler)
    server = grpc.aio.server(options=NARROW)
    sampler_pb2_grpc.add_SamplerServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=NARROW) as channel:
        yield UnreadWorld(sampler_pb2_grpc.SamplerStub(channel), scheduler)
    await server.stop(None)


def request(**fields: Any) -> sampler_pb2.SampleRequest:
    return sampler_pb2.SampleRequest(
        operation_id="sample",
        version=common_pb2.WeightVersion(name="base/tiny", path="tiny"),
        prompt_tokens=np.asarray([5, 6], "<i4").tobytes(),
        num_samples=1,
        params=sampler_pb2.SamplingParams(max_tokens=4, temperature=1.0, top_k=-1, top_p=1.0),
        **fields,
    )


async def test_an_unread_stream_frees_the_engine_and_its_reader_learns_that_it_ended(
    world: UnreadWorld,
):
    call = world.stub.SampleStream(request(), timeout=DEADLINE)
    await world.until_given_up(1)
    first = await call.read()
    assert len(first.delta.tokens) == 4 * TOKENS
    with pytest.raises(grpc.aio.AioRpcError, match=r"not read for 0\.2 s") as refused:
        await call.read()
    assert refused.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_unread_replies_free_the_engine_and_their_reader_learns_that_it_ended(
    world: UnreadWorld,
):
    call = world.stub.Sample(timeout=DEADLINE)
    # A refusal answers the first request, and its long version fills the message.
    refused = request(number=1)
    refused.version.path, refused.version.name = "", "v" * TOKENS
    await call.write(sampler_pb2.SampleRequests(requests=[refused, request(number=2)]))
    await world.until_given_up(1)
    assert [each.number for each in (await call.read()).replies] == [1]
    with pytest.raises(grpc.aio.AioRpcError, match=r"not read for 0\.2 s"):
        await call.read()
