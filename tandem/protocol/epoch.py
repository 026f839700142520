"""The epoch of a gateway, by which workers and agents refuse earlier gateways.

Each gateway has a higher epoch than earlier ones, and sends it with every call. After the first
call of a later gateway, a worker or agent refuses all earlier ones, even on open streams. So a
frozen gateway that wakes after its replacement reaches nobody. A call without an epoch comes from
the agent."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import TypeAlias, TypeVar, cast

import grpc
import grpc.aio

from tandem.protocol.fencing import CallRefused

EPOCH_METADATA_KEY = "x-tandem-epoch"

NEWEST_EPOCH_METADATA_KEY = "tandem-newest-epoch"
"""The trailing metadata key of FAILED_PRECONDITION: the newest gateway's epoch."""

Request = TypeVar("Request")
Reply = TypeVar("Reply")
Answer: TypeAlias = Callable[
    [AsyncIterator[Request], grpc.aio.ServicerContext[Request, Reply]], Awaitable[None]
]


def ending(
    abort: Callable[[grpc.aio.ServicerContext[Request, Reply]], Awaitable[None]],
) -> grpc.RpcMethodHandler[Request, Reply]:
    """Return a handler that ends a call before its request is read.

    gRPC reads a single request, however large, before it calls the handler. A stream handler reads
    only on demand."""

    async def end(
        _requests: AsyncIterator[Request], context: grpc.aio.ServicerContext[Request, Reply]
    ) -> Reply:
        await abort(context)
        raise AssertionError("abort raises")

    return cast("grpc.RpcMethodHandler[Request, Reply]", grpc.stream_unary_rpc_method_handler(end))


class EpochInterceptor(grpc.aio.ServerInterceptor):
    """Ends calls of earlier gateways with FAILED_PRECONDITION before it reads their requests.

    It stands behind the check of the secret: a caller with a high epoch shuts others out."""

    def __init__(self) -> None:
        self._newest = 0

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Request, Reply] | None]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Request, Reply] | None:
        given = dict(handler_call_details.invocation_metadata).get(EPOCH_METADATA_KEY)
        if given is not None:
            epoch = int(given)
            if epoch < self._newest:
                return ending(partial(self._refuse, epoch))
            self._newest = epoch
        handler = await continuation(handler_call_details)
        if given is None or handler is None or not handler.request_streaming:
            return handler
        return grpc.stream_stream_rpc_method_handler(
            # The types are those of gRPC's threaded server.
            self._while_newest(handler.stream_stream, epoch),  # type: ignore[arg-type]
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )

    def _while_newest(self, answer: Answer[Request, Reply], epoch: int) -> Answer[Request, Reply]:
        """End a stream at the first request after a later gateway's call."""

        async def answer_while_newest(
            requests: AsyncIterator[Request], context: grpc.aio.ServicerContext[Request, Reply]
        ) -> None:
            async def heard() -> AsyncIterator[Request]:
                async for request in requests:
                    if epoch < self._newest:
                        raise self._refusal(epoch)
                    yield request

            try:
                await answer(heard(), context)
            except CallRefused as refused:
                await refused.abort(context)

        return answer_while_newest

    async def _refuse(self, epoch: int, context: grpc.aio.ServicerContext[Request, Reply]) -> None:
        await self._refusal(epoch).abort(context)

    def _refusal(self, epoch: int) -> CallRefused:
        return CallRefused(
            f"another gateway (epoch {self._newest}) has taken over from this one (epoch {epoch}); "
            "ask that one",
            ((NEWEST_EPOCH_METADATA_KEY, str(self._newest)),),
        )
