"""Waits for a worker's gRPC health service."""

from __future__ import annotations

import asyncio

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem.worker import GRPC_OPTIONS, SECRET_METADATA_KEY

_RETRY_SECONDS = 0.1
_FINAL = frozenset(
    {
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.UNIMPLEMENTED,
    }
)
"""Answers that no waiting turns into another."""


async def serving(*, address: str, secret: str, timeout: float) -> str:
    """Returns "" when the worker says SERVING, or what it said instead.

    That is so after `timeout` seconds, or at once where waiting cannot help (a wrong secret).

    It watches rather than asks again and again, so that a worker which loads a model on all
    cores is left alone.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout
    metadata = ((SECRET_METADATA_KEY, secret),)
    last = "it was not reached"
    async with grpc.aio.insecure_channel(address, options=GRPC_OPTIONS) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        while (left := deadline - loop.time()) > 0:
            try:
                async for reply in stub.Watch(
                    health_pb2.HealthCheckRequest(),
                    metadata=metadata,
                    timeout=left,
                    wait_for_ready=True,
                ):
                    if reply.status == health_pb2.HealthCheckResponse.SERVING:
                        return ""
                    status = health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)
                    last = f"its health was {status}"
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                    last = f"its health service answered {error.code().name}: {error.details()}"
                if error.code() in _FINAL:
                    return last
            # The stream ended early: the worker's servers are restarting or it is on its way out.
            await asyncio.sleep(min(_RETRY_SECONDS, max(0.0, deadline - loop.time())))
    return last
