"""Waits for a worker's health service."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem.protocol.channels import worker_channel
from tandem.protocol.worker import SECRET_METADATA_KEY, WorkerHandle

_RETRY_SECONDS = 0.1
_WATCH_SECONDS = 60.0
"""The limit of one health call. A long load needs several, because the calls may be the worker's
lifeline."""
_FINAL_CODES = (
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.UNIMPLEMENTED,
)
"""Status codes that waiting does not change."""


async def wait_until_serving(handle: WorkerHandle, *, timeout: float) -> str:
    """Return "" once the worker's health is SERVING, else its last answer in words.

    It gives up after `timeout` seconds, or at once if waiting cannot help, as with a wrong secret.
    It uses the streaming Watch: polling would disturb a worker that loads a model on all cores."""
    last = "it was not reached"
    metadata = ((SECRET_METADATA_KEY, handle.secret),)
    with suppress(TimeoutError):
        async with worker_channel(handle) as channel, asyncio.timeout(timeout):
            watch = health_pb2_grpc.HealthStub(channel).Watch
            while True:
                try:
                    async for reply in watch(
                        health_pb2.HealthCheckRequest(),
                        metadata=metadata,
                        timeout=_WATCH_SECONDS,
                        wait_for_ready=True,
                    ):
                        if reply.status == health_pb2.HealthCheckResponse.SERVING:
                            return ""
                        status = health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)
                        last = f"its health was {status}"
                except grpc.aio.AioRpcError as error:
                    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                        continue
                    last = f"its health service answered {error.code().name}: {error.details()}"
                    if error.code() in _FINAL_CODES:
                        break
                # The stream ended early: the worker's server is starting or shutting down.
                await asyncio.sleep(_RETRY_SECONDS)
    return last
