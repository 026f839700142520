"""A worker's gRPC server: services, health and metrics. It checks the secret and the epoch."""

from __future__ import annotations

import hmac
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry

from tandem.protocol.channels import server_credentials
from tandem.protocol.epoch import EpochInterceptor, ending
from tandem.protocol.metrics_server import MetricsServer
from tandem.protocol.process_use import USE_METADATA_KEY, UseThread
from tandem.protocol.use_metrics import UseCollector
from tandem.protocol.worker import (
    GRPC_OPTIONS,
    MOST_REQUEST_BYTES,
    PROTOCOL,
    PROTOCOL_METADATA_KEY,
    SECRET_METADATA_KEY,
    SERVER_OPTIONS,
    VERSION_METADATA_KEY,
    WorkerKind,
    WorkerReport,
    WorkerSpec,
    own_version,
)
from tandem.telemetry import get_log

Request = TypeVar("Request")
Reply = TypeVar("Reply")


def server_options(kind: WorkerKind) -> list[tuple[str, int]]:
    largest = ("grpc.max_receive_message_length", MOST_REQUEST_BYTES[kind])
    return [*(each for each in GRPC_OPTIONS if each[0] != largest[0]), largest, *SERVER_OPTIONS]


class WorkerServer:
    """Use: `server = WorkerServer(spec)`, `add_TrainerServicer_to_server(servicer, server.grpc)`,
    `link.report(await server.listen(registry))`. Once the model is loaded, `await
    server.set_serving(True)`. At the end, `await server.stop_serving(grace)`."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec
        self._use = UseThread(spec.devices)
        self._health = _Health(self._use)
        self._secret = SecretInterceptor(spec.secret)
        self.grpc = grpc.aio.server(
            options=server_options(spec.kind), interceptors=[self._secret, EpochInterceptor()]
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)

    async def listen(self, registry: CollectorRegistry) -> WorkerReport:
        """Serve, with the health NOT_SERVING, and serve metrics on another port."""
        spec = self._spec
        registry.register(UseCollector(lambda: self._use.use))
        await self.set_serving(False)
        host = f"[{spec.host}]" if ":" in spec.host else spec.host
        address = f"{host}:{spec.port}"
        if spec.tls is None:
            port = self.grpc.add_insecure_port(address)
        else:
            port = self.grpc.add_secure_port(address, server_credentials(spec.tls, clients=False))
        await self.grpc.start()
        if spec.lifeline:
            threading.Thread(target=self._hold_lifeline, name="lifeline", daemon=True).start()
        return WorkerReport(
            address=f"{host}:{port}",
            metrics_port=MetricsServer(registry, host=spec.host).serve_metrics(
                port=spec.metrics_port, or_any=True
            ),
        )

    def _hold_lifeline(self) -> None:
        """End the worker when no gateway has called it for too long. Gateways call every few
        seconds."""
        while (left := self._secret.called_at + self._spec.lifeline - time.monotonic()) > 0:
            time.sleep(left)
        get_log().error("no_gateway", worker_id=self._spec.worker_id, seconds=self._spec.lifeline)
        if os.getpgrp() == os.getpid() != 1:
            os.killpg(os.getpid(), signal.SIGKILL)
        os._exit(1)  # The end of a container's first process ends the container.

    async def set_serving(self, serving: bool) -> None:
        """Set the health that watchers of this worker see."""
        status = health_pb2.HealthCheckResponse
        await self._health.set("", status.SERVING if serving else status.NOT_SERVING)
        if serving:
            self._use.start_measuring()

    async def stop_serving(self, grace: float) -> None:
        """Refuse new calls, and cancel unfinished ones after `grace` seconds."""
        await self._health.enter_graceful_shutdown()
        await self.grpc.stop(grace)


class _Health(health.aio.HealthServicer):  # type: ignore[misc] # grpcio-health has no types
    """Adds the worker's protocol, version and use to each answer."""

    _about = ((PROTOCOL_METADATA_KEY, str(PROTOCOL)), (VERSION_METADATA_KEY, own_version()))

    def __init__(self, use: UseThread) -> None:
        super().__init__()
        self._use = use

    async def Check(
        self,
        request: health_pb2.HealthCheckRequest,
        context: grpc.aio.ServicerContext[
            health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse
        ],
    ) -> health_pb2.HealthCheckResponse:
        context.set_trailing_metadata((*self._about, (USE_METADATA_KEY, self._use.text)))
        return await super().Check(request, context)


class SecretInterceptor(grpc.aio.ServerInterceptor):
    """Ends a call without the secret with UNAUTHENTICATED, before its request is read.

    It guards the whole server, also gRPC's own health service. `called_at`: the last valid call, on
    the monotonic clock."""

    def __init__(self, secret: str) -> None:
        assert secret, "a worker without a secret would be open to all"
        self._secret = secret.encode()
        self.called_at = time.monotonic()

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Request, Reply] | None]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Request, Reply] | None:
        given = dict(handler_call_details.invocation_metadata).get(SECRET_METADATA_KEY, "")
        raw = given.encode() if isinstance(given, str) else given
        if not hmac.compare_digest(raw, self._secret):
            return ending(_refuse)
        self.called_at = time.monotonic()
        return await continuation(handler_call_details)


async def _refuse(context: grpc.aio.ServicerContext[Request, Reply]) -> None:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the worker's secret is missing or wrong")
