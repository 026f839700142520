"""A worker's lease on its devices, and its refusal of calls without that lease.

A worker of a leased group starts awake, with a fencing token. Every call that needs the devices
carries the current token as metadata. Sleep and Wake carry a newer one. The worker refuses older
tokens, such as that of a Wake which outlived its sender, and it does not compute while asleep. See
docs/sharing.md."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import grpc
import grpc.aio

LEASE_METADATA_KEY = "x-tandem-lease"

FENCED_METADATA_KEY = "tandem-newest-lease"
"""The trailing metadata key of FAILED_PRECONDITION: the worker's newest token."""

_Request = TypeVar("_Request")
_Reply = TypeVar("_Reply")


@dataclass
class CallRefused(Exception):
    """A stream's reader raises this, and its writer aborts the call after the last write. gRPC
    cannot abort a call during a write, and then never ends it."""

    details: str
    metadata: tuple[tuple[str, str], ...]

    async def abort(self, context: grpc.aio.ServicerContext[_Request, _Reply]) -> None:
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, self.details, self.metadata)


class Fence:
    """Refuses calls to one worker without its newest lease. Use it only in the event loop.

    `token` 0: not leased, and always awake."""

    def __init__(self, token: int) -> None:
        self._newest = token
        self.leased = token > 0
        self.asleep = False

    async def check(self, context: grpc.aio.ServicerContext[_Request, _Reply]) -> None:
        """Abort the call unless it has the lease and the worker is awake."""
        try:
            self.require(context)
        except CallRefused as refused:
            await refused.abort(context)

    def require(self, context: grpc.aio.ServicerContext[_Request, _Reply]) -> None:
        """Raises `CallRefused` unless the call has the lease and the worker is awake."""
        if not self.leased:
            return
        token = self._token_of(context)
        if token != self._newest or self.asleep:
            raise self._refusal(token, f"it is {'asleep' if self.asleep else 'awake'}")

    async def admit(self, context: grpc.aio.ServicerContext[_Request, _Reply]) -> None:
        """Note the token of a Sleep or Wake. Abort the call if it is older than the newest."""
        token = self._token_of(context)
        if not self.leased or token < self._newest:
            await self._refusal(token, "a newer call came before").abort(context)
        self._newest = token

    def _token_of(self, context: grpc.aio.ServicerContext[_Request, _Reply]) -> int:
        return int(dict(context.invocation_metadata() or ()).get(LEASE_METADATA_KEY, 0))

    def _refusal(self, token: int, why: str) -> CallRefused:
        return CallRefused(
            f"the worker was called with the lease {token}, its newest is {self._newest}: {why}",
            ((FENCED_METADATA_KEY, str(self._newest)),),
        )
