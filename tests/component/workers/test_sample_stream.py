"""The stream of samples between gateway and sampler."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc.aio
import pytest

from gateway.workers.clients import WorkerUnavailable, errors_translated
from gateway.workers.epoch import Epoch
from gateway.workers.sampler_client import SamplerClient
from gateway.workers.worker import Worker
from tandem.errors import GatewaySuperseded
from tandem.protocol.epoch import EpochInterceptor
from tandem.protocol.fencing import LEASE_METADATA_KEY
from tandem.protocol.worker import WorkerHandle
from tandem.v1 import sampler_pb2, sampler_pb2_grpc


class Sampler(sampler_pb2_grpc.SamplerServicer):
    """Records requests, and answers those with even seq_ids."""

    def __init__(self) -> None:
        self.leases: list[str] = []
        self.batches: list[list[int]] = []
        self.cancelled: list[int] = []
        self.broken = asyncio.Event()
        self.writing = asyncio.Lock()

    async def Load(self, request, context):
        return sampler_pb2.LoadReply()

    async def Sample(self, requests, context):
        self.leases.append(dict(context.invocation_metadata()).get(LEASE_METADATA_KEY, ""))
        reading = asyncio.create_task(self.read(requests, context))
        breaking = asyncio.create_task(self.broken.wait())
        await asyncio.wait([reading, breaking], return_when=asyncio.FIRST_COMPLETED)
        if breaking.done():
            self.broken.clear()
            async with self.writing:  # gRPC cannot abort a call during a write
                await context.abort(grpc.StatusCode.UNAVAILABLE, "it broke")
        await reading

    async def read(self, requests, context) -> None:
        async for batch in requests:
            self.batches.append([each.seq_id for each in batch.requests])
            self.cancelled += batch.cancelled
            even = [each for each in batch.requests if each.seq_id % 2 == 0]
            replies = [sampler_pb2.SampleReply(number=r.number, seconds=r.seq_id) for r in even]
            async with self.writing:
                await context.write(sampler_pb2.SampleReplies(replies=replies[::-1]))


class World:
    def __init__(self, sampler: Sampler, address: str) -> None:
        self.sampler = sampler
        self.handle = WorkerHandle(
            worker_id="sampler-test",
            kind="sampler",
            secret="secret",
            address=address,
            model_name="tiny",
            model_path="tiny",
            session_id="s-1",
            run_id="",
            max_lora_rank=0,
            metrics_port=0,
        )
        self.worker = self.gateway(1)
        self.client = SamplerClient(self.worker, timeout=60, give_up=pytest.fail)

    def gateway(self, epoch: int) -> Worker:
        return Worker.of(self.handle, Epoch(number=epoch, superseded=lambda: None))

    def sample(self, seq_id: int) -> asyncio.Task[sampler_pb2.SampleReply]:
        request = sampler_pb2.SampleRequest(seq_id=seq_id)
        return asyncio.create_task(self.client.sample(request))


@pytest.fixture
async def world() -> AsyncIterator[World]:
    sampler = Sampler()
    server = grpc.aio.server(interceptors=[EpochInterceptor()])
    sampler_pb2_grpc.add_SamplerServicer_to_server(sampler, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    world = World(sampler, f"127.0.0.1:{port}")
    async with asyncio.timeout(30):
        yield world
    await world.worker.channel.close()
    await server.stop(None)


async def test_samples_of_one_turn_are_one_message_and_each_gets_its_own_reply(world: World):
    replies = await asyncio.gather(*(world.sample(seq_id) for seq_id in (4, 2, 8)))
    assert [reply.seconds for reply in replies] == [4, 2, 8]
    assert world.sampler.batches == [[4, 2, 8]]


async def test_a_sample_that_nobody_waits_for_any_more_is_cancelled_there(world: World):
    given_up = world.sample(1)
    await world.sample(2)
    given_up.cancel()
    await asyncio.gather(given_up, return_exceptions=True)
    await world.sample(4)
    assert world.sampler.cancelled == [0]
    assert len(world.sampler.leases) == 1


async def test_a_stream_that_breaks_fails_what_is_on_it_and_the_next_sample_opens_another(
    world: World,
):
    lost = [world.sample(1), world.sample(3)]
    await world.sample(2)
    world.sampler.broken.set()
    for each in lost:
        with pytest.raises(WorkerUnavailable, match="it broke"):
            await each
    assert (await world.sample(6)).seconds == 6


async def test_another_lease_takes_a_stream_of_its_own_and_the_one_before_ends(world: World):
    await world.sample(2)
    world.worker.lease = 5
    await asyncio.gather(world.sample(4), world.sample(6))
    assert world.sampler.leases == ["", "5"]
    assert world.sampler.batches == [[2], [4, 6]]


async def test_a_gateway_that_was_replaced_is_refused_on_the_stream_that_it_has(world: World):
    await world.sample(2)
    later = SamplerClient(world.gateway(2), timeout=60, give_up=pytest.fail)
    await later.load(sampler_pb2.LoadRequest())
    with pytest.raises(GatewaySuperseded, match=r"epoch 2\) has taken over"):
        await world.sample(4)
    await later.worker.channel.close()


async def test_a_channel_that_is_closed_fails_what_is_on_its_stream(world: World):
    lost = world.sample(1)
    await world.sample(2)
    await world.worker.channel.close()
    with pytest.raises(WorkerUnavailable):
        await lost
    with pytest.raises(WorkerUnavailable):
        await world.sample(4)


async def test_a_refusal_during_a_send_never_becomes_the_client_s_error(world: World):
    later = SamplerClient(world.gateway(2), timeout=60, give_up=pytest.fail)
    await later.load(sampler_pb2.LoadRequest())
    for _ in range(100):
        with pytest.raises((GatewaySuperseded, WorkerUnavailable)):
            await world.sample(2)
    await later.worker.channel.close()


async def test_grpc_s_own_error_of_a_failed_send_means_that_the_worker_is_unavailable(world: World):
    hidden = grpc.aio.AioRpcError(
        grpc.StatusCode.INTERNAL,
        grpc.aio.Metadata(),
        grpc.aio.Metadata(),
        details="Internal error from Core",
    )
    with pytest.raises(WorkerUnavailable, match="during a send"):
        async with errors_translated(world.worker):
            raise hidden
