"""Deadlines of operations and samples: waiting for others costs them no time."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import pytest

from gateway.owners.usage.time_shares import Timelines
from gateway.runs.delivery import CallDelivery
from gateway.runs.dispatcher import Dispatcher
from gateway.runs.operations import AdamParams, Call, Operation, OptimStep, RunBroken
from gateway.runs.runner import OperationRunner
from gateway.runs.trainer import RunTrainer
from gateway.runs.trainer_host import TrainerHost
from gateway.storage.futures.table import Future, Result
from gateway.workers.clients import CallOrder, TrainerClient
from gateway.workers.run_options import RunOptions
from gateway.workers.sampler_client import SamplerClient
from tandem.errors import OperationTimedOut
from tandem.settings.gateway import GatewaySettings
from tandem.v1 import sampler_pb2, trainer_pb2
from tests.support.gateway.sample_streams import answered
from tests.support.virtual_time import run_in_virtual_time

WORKER: Any = SimpleNamespace(
    channel=SimpleNamespace(
        unary_unary=lambda *_args, **_more: None,
        unary_stream=lambda *_args, **_more: None,
        stream_stream=lambda *_args, **_more: None,
    ),
    lease=0,
    handle=SimpleNamespace(kind="worker"),
    metadata=(),
)
LIMIT = 1800.0


class OneAtATime:
    """A worker that takes `seconds` for each call, one at a time. Late calls raise, as in gRPC."""

    def __init__(self, seconds: dict[int, float], reply: Any) -> None:
        self.seconds = seconds
        self.reply = reply
        self.calls = 0
        self.deadlines: list[float | None] = []
        self._turn = asyncio.Lock()

    async def __call__(self, _request: Any, *, metadata: Any, timeout: float | None = None) -> Any:
        self.calls += 1
        self.deadlines.append(timeout)
        number = self.calls
        async with asyncio.timeout(timeout), self._turn:
            await asyncio.sleep(self.seconds[number])
        return self.reply


class AlwaysAwake(MagicMock):
    """A supervisor whose workers need no turn."""

    @asynccontextmanager
    async def use(self, key: str, **_about: Any):
        yield SimpleNamespace(key=key, process="p")


async def serve(seconds: dict[int, float]) -> dict[int, Any]:
    """Give a run one operation of each duration. Return the outcomes."""
    client: Any = TrainerClient(WORKER, run_id="r", timeout=LIMIT, window=4, calls=CallOrder())
    trainer = OneAtATime(seconds, trainer_pb2.OptimStepReply(step=1))
    client.stub.OptimStep = trainer
    client.stub.Progress = OneAtATime(defaultdict(float), trainer_pb2.ProgressReply())
    tools: Any = MagicMock()
    run: Any = SimpleNamespace(
        id="r",
        session_id="s",
        owner="o",
        model=SimpleNamespace(name="m"),
        about=SimpleNamespace(ranks=1),
        options=RunOptions(),
        log=None,
        snapshot_asked="",
        timeline=Timelines().open("r", session_id="s"),
    )
    run.host = TrainerHost(
        "r",
        first=run,
        sampler="",
        settings=GatewaySettings(),
        supervisor=AlwaysAwake(),
        adapter=tools,
    )
    trainer_of_run = RunTrainer(run=run, tools=tools, on_lost=tools)
    trainer_of_run._serve(client)
    runner = OperationRunner(trainer=trainer_of_run, tools=tools)
    outcomes: dict[int, Any] = {}
    ended = asyncio.Event()

    def end(operation: Operation, outcome: Any) -> None:
        outcomes[operation.seq_id] = outcome
        if len(outcomes) == len(seconds):
            ended.set()

    dispatcher = Dispatcher(window=4, window_bytes=1000, gap_timeout=60, end=end)
    for seq_id in seconds:
        future = Future(request_id=f"r:{seq_id}", source="operation", describe=lambda: None)
        body = OptimStep(params=AdamParams())
        operation = Operation(
            run_id="r", seq_id=seq_id, kind="optim_step", future=future, body=body
        )
        dispatcher.put(operation)
    serving = asyncio.create_task(dispatcher.serve(runner.carry_out))
    await asyncio.wait(
        [serving, waiting := asyncio.create_task(ended.wait())], return_when="FIRST_COMPLETED"
    )
    waiting.cancel()
    if serving.done():
        serving.result()
    serving.cancel()
    assert all(d is not None and d > 4 * LIMIT for d in trainer.deadlines), "the worker knows one"
    return outcomes


def test_operations_that_wait_for_those_before_them_lose_no_time():
    outcomes = run_in_virtual_time(serve(dict.fromkeys(range(1, 7), 1700.0)))
    assert {type(outcome) for outcome in outcomes.values()} == {Result}


def test_an_operation_that_takes_too_long_ends_the_run_when_its_own_time_is_over():
    async def scenario() -> float:
        with pytest.raises(RunBroken) as broken:
            await serve({1: 1000.0, 2: 1e9, 3: 1.0})
        assert isinstance(broken.value.error, OperationTimedOut)
        return asyncio.get_running_loop().time()

    assert run_in_virtual_time(scenario()) == pytest.approx(1000.0 + LIMIT)


def test_what_takes_no_longer_than_the_interval_is_not_asked_how_far_it_is():
    """However long it waits for earlier ones."""

    async def progress_asked_of(*, waits: float, takes: float) -> int:
        delivery, client, call = object.__new__(CallDelivery), MagicMock(), Call(MagicMock())
        client.progress = AsyncMock()
        with delivery.following(call, client):
            await asyncio.sleep(waits)
            call.begin()
            await asyncio.sleep(takes)
        return client.progress.await_count

    async def scenario() -> list[int]:
        return [
            await progress_asked_of(waits=waits, takes=takes)
            for waits, takes in ((0.0, 1.9), (1.9, 1.9), (100.0, 1.9), (100.0, 2.1), (0.0, 5.0))
        ]

    assert run_in_virtual_time(scenario()) == [0, 0, 0, 1, 1]


async def sample(client: SamplerClient) -> sampler_pb2.SampleReply:
    return await client.sample(sampler_pb2.SampleRequest())


def sampler(seconds: dict[int, float], given_up: list[str]) -> SamplerClient:
    client: Any = SamplerClient(WORKER, timeout=LIMIT, give_up=given_up.append)
    engine = OneAtATime(seconds, sampler_pb2.SampleReply(sampled_tokens=1))

    async def answer(_request: sampler_pb2.SampleRequest) -> sampler_pb2.SampleReply:
        return sampler_pb2.SampleReply.FromString(
            (await engine(_request, metadata=())).SerializeToString()
        )

    client._stub.Sample = lambda requests, metadata: answered(requests, answer)
    return client


def test_samples_that_queue_in_the_engine_lose_no_time():
    async def scenario() -> list[sampler_pb2.SampleReply]:
        client = sampler(dict.fromkeys(range(1, 7), 1700.0), given_up)
        return await asyncio.gather(*(sample(client) for _ in range(6)))

    given_up: list[str] = []
    assert [reply.sampled_tokens for reply in run_in_virtual_time(scenario())] == [1] * 6
    assert not given_up


def test_a_sampler_that_answers_nobody_is_given_up():
    async def scenario() -> float:
        client = sampler({1: 100.0, 2: 1e9, 3: 1e9}, given_up)
        outcomes = await asyncio.gather(*(sample(client) for _ in range(3)), return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [
            sampler_pb2.SampleReply,
            OperationTimedOut,
            OperationTimedOut,
        ]
        return asyncio.get_running_loop().time()

    given_up: list[str] = []
    assert run_in_virtual_time(scenario()) == pytest.approx(100.0 + 2 * LIMIT)
    assert given_up[0].startswith("the sampler has answered nothing for 3600 s")


def test_a_reader_that_does_not_read_says_nothing_about_the_sampler():
    class Stream:
        def __init__(self, *_args: Any, **_more: Any) -> None:
            self._events = [
                sampler_pb2.SampleEvent(delta=sampler_pb2.SampleDelta()),
                sampler_pb2.SampleEvent(reply=sampler_pb2.SampleReply(sampled_tokens=1)),
            ]

        def __aiter__(self) -> Stream:
            return self

        async def __anext__(self) -> sampler_pb2.SampleEvent:
            return self._events.pop(0)

        def cancel(self) -> None: ...

    async def slow_reader(_delta: sampler_pb2.SampleDelta) -> None:
        await asyncio.sleep(5 * LIMIT)

    async def scenario() -> sampler_pb2.SampleReply:
        client: Any = sampler({}, given_up)
        client._stub.SampleStream = Stream
        return await client.sample(sampler_pb2.SampleRequest(), slow_reader)

    given_up: list[str] = []
    assert run_in_virtual_time(scenario()).sampled_tokens == 1
    assert not given_up
