"""The gRPC server of a worker: its services, its health and its metrics, behind its secret
and closed to earlier gateways."""

from __future__ import annotations

import hmac
import os
from collections.abc import Awaitable, Callable
from typing import TypeVar

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry

from tandem.epoch import EpochInterceptor
from tandem.telemetry import serve_metrics
from tandem.worker import GRPC_OPTIONS, SECRET_METADATA_KEY, WorkerReport, WorkerSpec

Request = TypeVar("Request")
Reply = TypeVar("Reply")


class WorkerServer:
    """Literal use: `server = WorkerServer(spec)`; `add_TrainerServicer_to_server(servicer,
    server.grpc)`; `link.report(await server.listen(registry))`; `await server.set_serving(True)`
    once the model is loaded; `await server.stop(grace)`.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        self._host = spec.host
        self._health = health.aio.HealthServicer()
        self.grpc = grpc.aio.server(
            options=GRPC_OPTIONS,
            interceptors=[SecretInterceptor(spec.secret), EpochInterceptor()],
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)

    async def listen(self, registry: CollectorRegistry) -> WorkerReport:
        """Serve on a free port, with a health of NOT_SERVING, and the metrics on another one.

        Returns the report that says where.
        """
        await self.set_serving(False)
        port = self.grpc.add_insecure_port(f"{self._host}:0")
        await self.grpc.start()
        return WorkerReport(
            address=f"{self._host}:{port}",
            metrics_port=serve_metrics(registry, host=self._host),
            pid=os.getpid(),
        )

    async def set_serving(self, serving: bool) -> None:
        """Tell whoever watches the worker's health that it takes calls, or does not."""
        status = health_pb2.HealthCheckResponse
        await self._health.set("", status.SERVING if serving else status.NOT_SERVING)

    async def stop(self, grace: float) -> None:
        """Take no more calls; cancel those that have not ended after `grace` seconds."""
        await self._health.enter_graceful_shutdown()
        await self.grpc.stop(grace)


class SecretInterceptor(grpc.aio.ServerInterceptor):
    """Ends a call with no or a wrong secret with UNAUTHENTICATED before its request is read.

    It guards the whole server, so that services added later, or a library's own (gRPC's health),
    are behind the same check.
    """

    def __init__(self, secret: str) -> None:
        assert secret, "a worker without a secret would be open to all"
        self._secret = secret.encode()

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
            return grpc.unary_unary_rpc_method_handler(_refuse)
        return await continuation(handler_call_details)


async def _refuse(_request: Request, context: grpc.aio.ServicerContext[Request, Reply]) -> Reply:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the worker's secret is missing or wrong")
    raise AssertionError("abort raises")
