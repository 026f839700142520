"""The agent's gRPC service, on a Unix socket or for other hosts, and its process."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import grpc.aio
from pydantic import ValidationError
from pydantic_settings import SettingsError

from tandem.agent import SENTENCE
from tandem.agent.address import agent_address, socket_path
from tandem.agent.host import this_host
from tandem.agent.launcher import ProcessLauncher
from tandem.agent.pool import pool_sizes
from tandem.agent.preflight import run_preflight
from tandem.errors import InvalidRequest, TandemError, UnknownSetting, WorkerStartFailed, describe
from tandem.protocol.certificate import Certificate, read_certificate
from tandem.protocol.channels import server_credentials
from tandem.protocol.epoch import EpochInterceptor
from tandem.protocol.heartbeat import send_heartbeats
from tandem.protocol.worker import (
    SERVER_OPTIONS,
    WorkerHandle,
    WorkerKind,
    WorkerSpec,
    compile_caches,
    set_process_limits,
)
from tandem.settings.gateway import settings_fault
from tandem.settings.variables import check_environment
from tandem.settings.workers import PoolSettings
from tandem.telemetry import configure_logging, get_log
from tandem.v1 import agent_pb2, agent_pb2_grpc, common_pb2

if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[object, object]

_KINDS = ("trainer", "sampler")
_OPTIONS = [*SERVER_OPTIONS, ("grpc.http2.max_ping_strikes", 0)]
"""Gateways may ping the agent often, so that they notice when it is frozen."""


@dataclass(frozen=True)
class Listening:
    """An agent's address for the gateway of another host.

    `tls` is the folder of its certificate, `advertised` the host's name, by which the workers are
    reached. `logs` is the folder for their logs, where the gateway finds them."""

    address: str
    advertised: str
    tls: Path
    logs: Path | None = None


class AgentServicer(agent_pb2_grpc.AgentServicer):
    """Answers with a launcher's results. Its errors become a `Failure`."""

    def __init__(self, launcher: ProcessLauncher) -> None:
        self._launcher = launcher

    async def Describe(
        self,
        request: agent_pb2.DescribeAgentRequest,
        context: Context,
    ) -> agent_pb2.DescribeAgentReply:
        about = description()
        about.no_suspender = self._launcher.suspender.why_not()
        return about

    async def Preflight(
        self,
        request: agent_pb2.PreflightRequest,
        context: Context,
    ) -> agent_pb2.PreflightReply:
        try:
            checks = await run_preflight(request.needs, timeout=request.timeout_seconds)
        except TandemError as error:
            return agent_pb2.PreflightReply(failure=error.to_failure())
        return agent_pb2.PreflightReply(
            checks=[agent_pb2.PreflightCheck(**vars(each)) for each in checks]
        )

    async def Start(
        self,
        request: agent_pb2.StartWorkerRequest,
        context: Context,
    ) -> agent_pb2.StartWorkerReply:
        try:
            handle = await self._launcher.start(WorkerSpec.model_validate_json(request.spec))
        except TandemError as error:
            return agent_pb2.StartWorkerReply(failure=error.to_failure())
        return agent_pb2.StartWorkerReply(worker=_worker(handle))

    async def Stop(
        self,
        request: agent_pb2.StopWorkerRequest,
        context: Context,
    ) -> agent_pb2.StopWorkerReply:
        stopping = self._launcher.stop(request.worker_id, at_once=request.at_once)
        return agent_pb2.StopWorkerReply(failure=await _failure(stopping))

    async def Suspend(
        self,
        request: agent_pb2.SuspendWorkerRequest,
        context: Context,
    ) -> agent_pb2.SuspendWorkerReply:
        return await _switched(self._launcher.suspend, request)

    async def Resume(
        self,
        request: agent_pb2.SuspendWorkerRequest,
        context: Context,
    ) -> agent_pb2.SuspendWorkerReply:
        return await _switched(self._launcher.resume, request)

    async def List(
        self,
        request: agent_pb2.ListWorkersRequest,
        context: Context,
    ) -> agent_pb2.ListWorkersReply:
        try:
            handles = await self._launcher.list()
        except TandemError as error:
            return agent_pb2.ListWorkersReply(failure=error.to_failure())
        return agent_pb2.ListWorkersReply(workers=[_worker(handle) for handle in handles])

    async def Watch(
        self,
        request: agent_pb2.WatchRequest,
        context: Context,
    ) -> AsyncIterator[agent_pb2.WatchReply]:
        exits = self._launcher.watch()
        yield agent_pb2.WatchReply(running=self._launcher.told_ids())
        async for exit_ in exits:
            yield agent_pb2.WatchReply(ended=[agent_pb2.WorkerEnded(**vars(exit_))])


async def _switched(
    switch: Callable[..., Awaitable[None]], request: agent_pb2.SuspendWorkerRequest
) -> agent_pb2.SuspendWorkerReply:
    work = switch(request.worker_id, lease=request.lease, timeout=request.timeout_seconds)
    return agent_pb2.SuspendWorkerReply(failure=await _failure(work))


async def _failure(work: Awaitable[None]) -> common_pb2.Failure | None:
    try:
        await work
    except TandemError as error:
        return error.to_failure()
    return None


def _worker(handle: WorkerHandle) -> agent_pb2.AgentWorker:
    return agent_pb2.AgentWorker(**vars(handle))


def description() -> agent_pb2.DescribeAgentReply:
    host = this_host()
    return agent_pb2.DescribeAgentReply(
        pid=os.getpid(),
        kinds=[kind for kind in _KINDS if find_spec(f"{kind}_service") is not None],
        host=host.name,
        cores=host.cores,
        memory_bytes=host.memory_bytes,
        accelerators=[agent_pb2.Accelerator(**vars(each)) for each in host.accelerators],
        trainer_backends=host.backends,
        frameworks=[agent_pb2.Framework(**vars(each)) for each in host.frameworks],
    )


@contextmanager
def _locked(data_dir: Path) -> Iterator[None]:
    """Make the data directory if needed, and lock out other agents during the block."""
    data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd = os.open(data_dir / "agent.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise InvalidRequest(
                f"another agent uses the data directory {data_dir}; stop it, or choose another "
                "directory with --data-dir (TANDEM_DATA_DIR)"
            ) from error
        yield
    finally:
        os.close(fd)


@asynccontextmanager
async def serving(
    launcher: ProcessLauncher, *, data_dir: Path, listening: Listening | None = None
) -> AsyncIterator[None]:
    """Serve during the block, once an earlier agent's workers are gone. Then stop all workers."""
    certificate = read_certificate(listening.tls) if listening is not None else None
    await launcher.groups.end_earlier()
    await asyncio.to_thread(launcher.scratches.end_strays)
    await asyncio.to_thread(launcher.scratches.remove_all)
    launcher.look_after_scratch()
    launcher.metrics_port = launcher.metrics.serve_agent(listening.address if listening else "")
    server = grpc.aio.server(options=_OPTIONS, interceptors=[EpochInterceptor()])
    agent_pb2_grpc.add_AgentServicer_to_server(AgentServicer(launcher), server)
    _listen_here(server, data_dir)
    if listening is not None and certificate is not None:
        _listen(server, listening, certificate)
    await server.start()
    try:
        yield
    finally:
        try:
            await launcher.close()
        finally:
            await server.stop(grace=1)
            socket_path(data_dir).unlink(missing_ok=True)


def _listen(server: grpc.aio.Server, listening: Listening, certificate: Certificate) -> None:
    try:
        server.add_secure_port(listening.address, server_credentials(certificate, clients=True))
    except RuntimeError as error:
        raise WorkerStartFailed(
            f"the agent cannot listen at {listening.address}: {describe(error)}"
        ) from error


def _listen_here(server: grpc.aio.Server, data_dir: Path) -> None:
    path = socket_path(data_dir)
    path.unlink(missing_ok=True)  # left by a killed agent
    try:
        server.add_insecure_port(agent_address(data_dir))
    except RuntimeError as error:
        raise WorkerStartFailed(f"the socket {path} cannot be made: {describe(error)}") from error
    path.chmod(0o600)


async def _serve_until_signalled(
    data_dir: Path, *, pool: Mapping[WorkerKind, int], listening: Listening | None
) -> None:
    asked = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, asked.set)
    heart = asyncio.create_task(send_heartbeats())
    launcher = ProcessLauncher(
        data_dir=data_dir,
        pool=pool,
        advertised=listening.advertised if listening is not None else "",
        logs=listening.logs if listening is not None else None,
    )
    async with serving(launcher, data_dir=data_dir, listening=listening):
        found = description()
        get_log().info(
            "agent_serves",
            address=listening.address if listening is not None else str(socket_path(data_dir)),
            kinds=list(found.kinds),
            cores=len(found.cores),
            accelerators=[each.name for each in found.accelerators],
        )
        await asked.wait()
    heart.cancel()


def run(data_dir: Path, *, listening: Listening | None = None) -> int:
    """Serve until SIGTERM or SIGINT. Returns the exit status."""
    configure_logging(service="agent")
    set_process_limits()
    for name, folder in compile_caches(data_dir).items():
        os.environ.setdefault(name, folder)
    try:
        with _locked(data_dir):
            check_environment(os.environ)
            pool = pool_sizes(PoolSettings())
            asyncio.run(_serve_until_signalled(data_dir, pool=pool, listening=listening))
    except (ValidationError, SettingsError) as error:
        print(f"{SENTENCE}{settings_fault(error)}", file=sys.stderr)
        return 1
    except TandemError as error:
        print(f"{SENTENCE}{error.message}", file=sys.stderr)
        return 2 if isinstance(error, UnknownSetting) else 1
    except OSError as error:  # from the data directory
        print(f"{SENTENCE}{error.filename}: {error.strerror}", file=sys.stderr)
        return 1
    return 0
