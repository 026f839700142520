"""Agents over TCP, and their workers over TLS."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import gateway.workers.launchers.agent
from gateway.workers.epoch import Epoch
from gateway.workers.launchers import make_launchers
from tandem.agent.launcher import ProcessLauncher
from tandem.agent.service import Listening, serving
from tandem.errors import InvalidRequest, WorkerStartFailed
from tandem.protocol.authority import Authority, write_certificate
from tandem.protocol.certificate import AGENT_NAME
from tandem.protocol.worker import SECRET_METADATA_KEY, WorkerSpec
from tandem.settings.gateway import GatewaySettings
from tests.support.ports import known_port
from tests.support.waiting import until_serving

DUMMY = str(Path(__file__).parents[2] / "support" / "dummy_worker.py")
EPOCH = Epoch(number=1, superseded=lambda: None)
KINDS = ("trainer", "sampler")


@pytest.fixture
def authority(tmp_path) -> Authority:
    made = Authority.create(tmp_path / "authority")
    write_certificate(tmp_path / "agent", made.issue(AGENT_NAME))
    return made


@pytest.fixture
async def agents(authority, tmp_path):
    """Two agents with separate data directories, and their gateway's settings."""
    async with AsyncExitStack() as stack:
        addresses = {kind: f"127.0.0.1:{known_port()}" for kind in KINDS}
        for kind in KINDS:
            data_dir = tmp_path / kind
            data_dir.mkdir()
            launcher = ProcessLauncher(
                data_dir=data_dir,
                command=lambda _: [sys.executable, DUMMY, "serve"],
                advertised="localhost",
                logs=tmp_path / "gateway" / "logs",
            )
            listening = Listening(
                address=addresses[kind], advertised="localhost", tls=tmp_path / "agent"
            )
            await stack.enter_async_context(
                serving(launcher, data_dir=data_dir, listening=listening)
            )
        yield GatewaySettings(
            data_dir=tmp_path / "gateway", agents=addresses, tls_dir=tmp_path / "authority"
        )


def spec(kind: str, *, secret: str = "the secret of a worker") -> WorkerSpec:
    return WorkerSpec.model_validate(
        {
            "worker_id": f"{kind}-s-0123456789ab-0",
            "kind": kind,
            "secret": secret,
            "model_name": "tiny",
            "model_path": "models/tiny",
            "session_id": "s-0123456789ab",
        }
    )


async def test_each_kind_of_worker_is_started_by_its_agent_and_called_by_tls(agents, tmp_path):
    launchers = make_launchers(agents, EPOCH)
    assert launchers["job"] is launchers["trainer"]
    handles = [await launchers[kind].start(spec(kind)) for kind in KINDS]
    for handle in handles:
        await until_serving(handle)
        assert handle.address.startswith("localhost:")
        log = tmp_path / "gateway" / "logs" / f"{handle.worker_id}.log"
        assert log.exists() and handle.secret not in log.read_text()
        async with grpc.aio.insecure_channel(handle.address) as plain:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await health_pb2_grpc.HealthStub(plain).Check(
                    health_pb2.HealthCheckRequest(),
                    metadata=((SECRET_METADATA_KEY, handle.secret),),
                    timeout=20,
                )
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    for handle in handles:
        launcher = launchers[handle.kind]
        assert launcher.name == f"agent at {agents.agents[handle.kind]}"
        assert await launcher.list() == [handle]
        exits = launcher.watch()
        os.kill(handle.pid, signal.SIGKILL)
        exit_ = await asyncio.wait_for(anext(exits), 60)
        assert exit_.worker_id == handle.worker_id
        assert await launcher.list() == []
        await launcher.close()
        with pytest.raises(StopAsyncIteration):
            await asyncio.wait_for(anext(exits), 60)


async def test_one_agent_starts_both_kinds_of_workers(agents):
    one = agents.model_copy(update={"agents": dict.fromkeys(KINDS, agents.agents["trainer"])})
    launchers = make_launchers(one, EPOCH)
    assert launchers["trainer"] is launchers["sampler"]
    await launchers["trainer"].close()


async def test_an_agent_says_on_its_own_host_whether_it_answers(agents, tmp_path):
    check = (sys.executable, "-m", "tandem.agent.check")
    for folder, status in (("trainer", 0), ("sampler", 0), ("agent", 1)):
        asked = await asyncio.create_subprocess_exec(
            *check, str(tmp_path / folder), stderr=asyncio.subprocess.PIPE
        )
        _, said = await asyncio.wait_for(asked.communicate(), 60)
        assert (asked.returncode, b"no agent answers at unix:" in said) == (status, status == 1)
    waiting = (*check, str(tmp_path / "trainer"))
    assert subprocess.call(waiting) == 1  # noqa: ASYNC221 - the agent stands still meanwhile


async def test_the_next_gateway_calls_what_the_one_before_has_left(agents):
    first = make_launchers(agents, EPOCH)["sampler"]
    handle = await first.start(spec("sampler"))
    await first.close()
    second = make_launchers(agents, EPOCH)["sampler"]
    assert await second.list() == [handle]
    await until_serving(handle)
    await second.stop(handle.worker_id)
    assert await second.list() == []
    await second.close()


async def test_an_agent_does_not_answer_a_gateway_of_another_authority(
    agents, tmp_path, monkeypatch
):
    monkeypatch.setattr(gateway.workers.launchers.agent, "_CONNECT_SECONDS", 2.0)
    Authority.create(tmp_path / "other")
    settings = agents.model_copy(update={"tls_dir": tmp_path / "other"})
    launcher = make_launchers(settings, EPOCH)["trainer"]
    with pytest.raises(WorkerStartFailed, match="TANDEM_AGENTS"):
        await launcher.start(spec("trainer"))
    await launcher.close()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tls_dir": None}, "tandem tls create"),
        ({"agents": {"trainer": "localhost:7400"}}, "names no agent for samplers"),
    ],
)
def test_agents_that_cannot_be_called_are_refused_at_the_start(agents, changes, said):
    with pytest.raises(InvalidRequest, match=said):
        make_launchers(agents.model_copy(update=changes), EPOCH)
