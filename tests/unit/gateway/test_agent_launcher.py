"""Workers of an agent that freezes, disconnects and is replaced."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any
from unittest.mock import AsyncMock

import grpc
import grpc.aio
import pytest

from gateway.workers.epoch import Epoch
from gateway.workers.launchers.agent import AgentLauncher
from tandem.errors import WorkerMayRun
from tandem.protocol.worker import WorkerHandle
from tandem.v1 import agent_pb2
from tests.support.kubernetes.gateway import spec
from tests.support.virtual_time import run_in_virtual_time


class Agents:
    """Replaces the stub. `Stop` gives or raises `answer`. A stream of exits breaks with the
    connection, or ends like an agent that stopped its workers."""

    def __init__(self) -> None:
        self.answer: agent_pb2.StopWorkerReply | grpc.StatusCode = agent_pb2.StopWorkerReply()
        self.streams: asyncio.Queue[Any] = asyncio.Queue()

    async def Stop(self, request, **_more):
        if isinstance(self.answer, grpc.StatusCode):
            raise broken(self.answer)
        return self.answer

    async def Watch(self, request, **_more):
        while True:
            match await self.streams.get():
                case "broke":
                    raise broken(grpc.StatusCode.UNAVAILABLE)
                case "ended":
                    return
                case running:
                    yield agent_pb2.WatchReply(running=running)


def broken(code: grpc.StatusCode) -> grpc.aio.AioRpcError:
    nothing = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(code, nothing, nothing, "it broke")


def launcher_of(agents: Agents, folder, *workers: str) -> AgentLauncher:
    epoch = Epoch(number=1, superseded=lambda: None)
    launcher = AgentLauncher(data_dir=folder, timeout=60, epoch=epoch)
    vars(launcher)["_stub"], vars(launcher)["_connect"] = agents, AsyncMock()
    for worker_id in workers:
        launcher._workers[worker_id] = WorkerHandle.of(spec(worker_id), address="")
    return launcher


@pytest.mark.parametrize(
    "answer",
    [
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.UNAVAILABLE,
        agent_pb2.StopWorkerReply(failure=WorkerMayRun("it is stuck").to_failure()),
    ],
    ids=["it is frozen", "it has ended", "it says so"],
)
def test_a_worker_is_not_gone_unless_its_agent_says_so(tmp_path, answer):
    async def scenario() -> None:
        agents = Agents()
        agents.answer = answer
        launcher = launcher_of(agents, tmp_path, "w")
        with pytest.raises(WorkerMayRun):
            await launcher.stop("w")
        agents.answer = agent_pb2.StopWorkerReply()
        await launcher.stop("w")

    run_in_virtual_time(scenario())


async def told(watch) -> str:
    async with asyncio.timeout(60):
        return (await anext(watch)).worker_id


async def nothing_is_told(watch) -> asyncio.Task[str]:
    waiting = asyncio.create_task(told(watch))
    await asyncio.sleep(50)
    assert not waiting.done()
    return waiting


def test_a_connection_that_broke_says_nothing_and_the_next_agent_what_is_left(tmp_path):
    async def scenario() -> None:
        agents = Agents()
        launcher = launcher_of(agents, tmp_path, "a", "b")
        watch = launcher.watch()
        agents.streams.put_nowait(["a", "b"])
        agents.streams.put_nowait("broke")
        waiting = await nothing_is_told(watch)
        assert not launcher.reports
        agents.streams.put_nowait(["b"])
        assert await waiting == "a"
        assert launcher.reports
        agents.streams.put_nowait("ended")
        assert await told(watch) == "b"
        await launcher.close()

    run_in_virtual_time(scenario())


@pytest.mark.parametrize("ends", ["before the agent answers", "before it serves"])
def test_nothing_is_kept_of_a_worker_that_did_not_come_to_serve(tmp_path, ends):
    async def scenario() -> None:
        agents = Agents()
        launcher = launcher_of(agents, tmp_path)
        reply = agent_pb2.StartWorkerReply(
            worker=agent_pb2.AgentWorker(worker_id="trainer-a", kind="trainer")
        )
        lost = broken(grpc.StatusCode.UNAVAILABLE)
        answers = {"before the agent answers": lost, "before it serves": reply}
        agents.Start = AsyncMock(side_effect=[answers[ends]])
        worker = spec("trainer-a")
        with contextlib.suppress(WorkerMayRun):
            await launcher.start(worker)
        await launcher.stop("trainer-a")
        assert not launcher._workers

    run_in_virtual_time(scenario())
