"""Who may call a worker: whoever has its secret, and nobody else, whatever they call.

An interceptor of the whole server, so that a service which is added later, or a library's own
(gRPC's health), is behind the same door.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from typing import TypeVar

import grpc
import grpc.aio

from tandem.worker import SECRET_METADATA_KEY

Request = TypeVar("Request")
Reply = TypeVar("Reply")


class SecretInterceptor(grpc.aio.ServerInterceptor):
    """Literal use: `grpc.aio.server(interceptors=[SecretInterceptor(spec.secret)])`. A call with
    no or another secret ends with UNAUTHENTICATED before its request is read."""

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
