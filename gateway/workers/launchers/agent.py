"""`AgentLauncher` starts workers through an agent, so that they can outlive the gateway. The agent
runs on this host, or at an address on another host or in a container."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar, cast

import grpc
import grpc.aio
from google.protobuf.message import Message

from gateway.workers.clients import Method, Request, this_task_is_cancelled
from gateway.workers.epoch import Epoch
from gateway.workers.needs import with_needs
from tandem.agent.address import agent_address, socket_path
from tandem.agent.host import NO_SUSPENDER, Accelerator, Host
from tandem.agent.metrics import local_metrics_address, metrics_address_of
from tandem.agent.preflight import JobNeeds, PreflightCheck
from tandem.backends.frameworks import Framework
from tandem.errors import WorkerMayRun, WorkerStartFailed, from_failure
from tandem.protocol.authority import Authority
from tandem.protocol.certificate import AGENT_NAME, GATEWAY_NAME
from tandem.protocol.channels import plain_channel, secure_channel
from tandem.protocol.exit_watchers import ExitWatchers
from tandem.protocol.worker import GRPC_OPTIONS, WorkerExit, WorkerHandle, WorkerSpec
from tandem.telemetry import get_log
from tandem.v1 import agent_pb2, agent_pb2_grpc

Answer = TypeVar("Answer", bound=Message)
Data = TypeVar("Data", Accelerator, Framework, PreflightCheck, WorkerHandle)

_ANY_ADDRESS = "0.0.0.0"
_CONNECT_SECONDS = 10.0
_RETRY_SECONDS = 0.1
_BEYOND_START = 60.0
_OPTIONS = [
    *GRPC_OPTIONS,
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 500),
    # The connection to a frozen agent, or to a vanished host, breaks after the sum of these. A
    # connection without messages gets as many pings: by default, gRPC sends it one a minute.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
]


@dataclass(eq=False, kw_only=True)
class AgentLauncher:
    """Implements `Launcher`.

    The agent is that of the data directory, or the agent at `address`. Then the gateway shows a
    certificate of the `authority`, and each worker gets one. The agent may start after the gateway,
    and start anew while the gateway runs.

    A worker is gone when the agent says so, or when a later agent does not know it: an agent
    answers only when nothing is left of the previous agent's workers. A broken connection proves
    nothing. The one to a frozen agent breaks, too. A call may take `timeout` seconds, and longer
    for slow starts."""

    data_dir: Path
    timeout: float
    epoch: Epoch
    address: str = ""
    authority: Authority | None = None

    prepare = staticmethod(with_needs)

    def __post_init__(self) -> None:
        self._workers: dict[str, WorkerHandle] = {}
        self._watchers = ExitWatchers()
        self._following: asyncio.Task[None] | None = None
        self._closed = False
        self._watches = False
        self._log = get_log()

    @property
    def name(self) -> str:
        return f"agent at {self.address}" if self.address else "agent"

    @property
    def metrics_address(self) -> str:
        if self.address:
            return metrics_address_of(self.address)
        return local_metrics_address(self.data_dir)

    @property
    def reports(self) -> bool:
        return self._watches

    @cached_property
    def _channel(self) -> grpc.aio.Channel:
        if self.authority is None:
            return plain_channel(agent_address(self.data_dir), options=_OPTIONS)
        return secure_channel(
            self.address,
            authority=self.authority.pem,
            name=AGENT_NAME,
            options=_OPTIONS,
            own=self.authority.issue(GATEWAY_NAME),
        )

    @cached_property
    def _stub(self) -> agent_pb2_grpc.AgentAsyncStub:
        return agent_pb2_grpc.AgentStub(self._channel)

    async def preflight(self, needs: JobNeeds, *, timeout: float) -> tuple[PreflightCheck, ...]:
        request = agent_pb2.PreflightRequest(needs=needs.model_dump_json(), timeout_seconds=timeout)
        reply = await self._ask(self._stub.Preflight, request, start_timeout=timeout)
        return tuple(_as(PreflightCheck, each) for each in reply.checks)

    async def start(self, spec: WorkerSpec) -> WorkerHandle:
        if self.authority is not None:
            tls = self.authority.issue(spec.worker_id)
            spec = spec.model_copy(update={"host": _ANY_ADDRESS, "tls": tls})
        request = agent_pb2.StartWorkerRequest(spec=spec.model_dump_json())
        reply = await self._ask(self._stub.Start, request, start_timeout=spec.start_timeout)
        handle = self._workers[spec.worker_id] = _as(WorkerHandle, reply.worker)
        return handle

    async def stop(self, worker_id: str, *, at_once: bool = False) -> None:
        request = agent_pb2.StopWorkerRequest(worker_id=worker_id, at_once=at_once)
        try:
            await self._ask(self._stub.Stop, request)
        except WorkerStartFailed as error:  # there is no agent now
            raise WorkerMayRun(error.message) from error
        self._workers.pop(worker_id, None)

    async def suspend(self, worker_id: str, *, lease: int, timeout: float) -> None:
        await self._switch(self._stub.Suspend, worker_id, lease, timeout)

    async def resume(self, worker_id: str, *, lease: int, timeout: float) -> None:
        await self._switch(self._stub.Resume, worker_id, lease, timeout)

    async def list(self) -> list[WorkerHandle]:
        reply = await self._ask(self._stub.List, agent_pb2.ListWorkersRequest())
        handles = [_as(WorkerHandle, worker) for worker in reply.workers]
        self._workers.update({handle.worker_id: handle for handle in handles})
        return handles

    async def describe_host(self) -> Host:
        reply = await self._ask(self._stub.Describe, agent_pb2.DescribeAgentRequest())
        return Host(
            name=reply.host,
            cores=tuple(reply.cores),
            memory_bytes=reply.memory_bytes,
            accelerators=tuple(_as(Accelerator, each) for each in reply.accelerators),
            backends=dict(reply.trainer_backends),
            frameworks=tuple(_as(Framework, each) for each in reply.frameworks),
            no_suspender=reply.no_suspender if reply.HasField("no_suspender") else NO_SUSPENDER,
        )

    def explain(self, worker_id: str) -> str:
        return ""  # a process waits for nobody

    def watch(self) -> AsyncIterator[WorkerExit]:
        if self._following is None and not self._closed:
            self._following = asyncio.create_task(self._follow(), name="agent-follower")
        return self._watchers.watch_exits()

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._following is not None:
            self._following.cancel()
            await asyncio.wait({self._following})
        await self._channel.close()
        self._watchers.close()

    async def _switch(
        self,
        method: Method[agent_pb2.SuspendWorkerRequest, agent_pb2.SuspendWorkerReply],
        worker_id: str,
        lease: int,
        timeout: float,
    ) -> None:
        request = agent_pb2.SuspendWorkerRequest(
            worker_id=worker_id, lease=lease, timeout_seconds=timeout
        )
        await self._ask(method, request, start_timeout=timeout)

    async def _ask(
        self, method: Method[Request, Answer], request: Request, *, start_timeout: float = 0.0
    ) -> Answer:
        """Call the agent. Raises the failure in its answer, `WorkerStartFailed` without an agent,
        and `WorkerMayRun` if it does not answer, since the call may have had its effect."""
        if self._closed:
            raise WorkerStartFailed("the launcher is closed")
        try:
            await self._connect()
            timeout = max(self.timeout, start_timeout + _BEYOND_START)
            reply = await method(request, metadata=self.epoch.metadata, timeout=timeout)
        except grpc.aio.AioRpcError as error:
            self.epoch.raise_if_superseded(error)
            raise _unknown(error) from error
        except (asyncio.CancelledError, grpc.aio.UsageError):
            # Closing a channel cancels its calls.
            if not self._closed or this_task_is_cancelled():
                raise
            raise WorkerStartFailed("the launcher is closed") from None
        if "failure" in reply.DESCRIPTOR.fields_by_name and reply.HasField("failure"):
            raise from_failure(cast(Any, reply).failure)
        return reply

    async def _connect(self) -> None:
        """Wait for the agent, which may be starting."""
        ready = grpc.ChannelConnectivity.READY
        if self._channel.get_state(try_to_connect=True) is ready:
            return
        if self.authority is not None:
            self._log.warning("agent_awaited", address=self.address)
        elif not socket_path(self.data_dir).exists():
            self._log.warning(
                "agent_awaited", start_it_with=f"tandem agent --data-dir {self.data_dir}"
            )
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                await self._channel.channel_ready()
        except TimeoutError:
            if self.authority is not None:
                raise WorkerStartFailed(
                    f"no agent answers at {self.address} (TANDEM_AGENTS) that could start workers; "
                    "see whether `tandem agent --listen` runs there, with a certificate of the "
                    "authority in TANDEM_TLS_DIR"
                ) from None
            raise WorkerStartFailed(
                "no agent answers that could start workers; start one with `tandem agent` and the "
                "same --data-dir (TANDEM_DATA_DIR), or agent and gateway with `tandem up`"
            ) from None

    async def _follow(self) -> None:
        """Report exits to the watchers, from one stream after the other. At the regular end of a
        stream, nothing is left of any worker. A new stream begins with the running workers."""
        while True:
            known = set(self._workers)
            try:
                request, metadata = agent_pb2.WatchRequest(), self.epoch.metadata
                async for reply in self._stub.Watch(
                    request, metadata=metadata, wait_for_ready=True
                ):
                    for ended in reply.ended:
                        self._tell(ended.worker_id, ended.reason, crashed=ended.crashed)
                    if not self._watches:
                        self._watches = True
                        self._tell_lost(known.difference(reply.running))
                self._tell_lost(tuple(self._workers))
            except grpc.aio.AioRpcError as error:
                self.epoch.raise_if_superseded(error)
            if self._watches:
                self._watches = False
                self._log.error("agent_lost", workers=len(self._workers))
            await asyncio.sleep(_RETRY_SECONDS)

    def _tell_lost(self, worker_ids: Collection[str]) -> None:
        for worker_id in worker_ids:
            if (worker := self._workers.get(worker_id)) is not None:
                self._tell(worker_id, f"the {worker.kind} ended with the agent that had started it")

    def _tell(self, worker_id: str, reason: str, *, crashed: bool = False) -> None:
        self._workers.pop(worker_id, None)
        self._watchers.tell(WorkerExit(worker_id=worker_id, reason=reason, crashed=crashed))


def _unknown(error: grpc.aio.AioRpcError) -> WorkerMayRun:
    reason = (
        "does not answer"
        if error.code() is grpc.StatusCode.UNAVAILABLE
        else f"answered {error.code().name}: {error.details()}"
    )
    return WorkerMayRun(f"the agent that starts workers {reason}")


def _as(kind: type[Data], message: Message) -> Data:
    """Return a message as the dataclass with its fields."""
    return kind(**{each.name: getattr(message, each.name) for each in fields(kind)})
