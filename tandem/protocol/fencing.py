"""The lease that a worker has on its devices, and the calls that it refuses without one.

A worker of a leased group starts awake, with a fencing token. Every call that needs its devices
carries the token of its lease as metadata, and so do Sleep and Wake, each with a newer one. The
worker refuses what is older than the newest token that it has seen, such as a Wake that was under
way while its sender died, and refuses to compute while it is asleep. See docs/sharing.md.
"""

from __future__ import annotations

from typing import NoReturn, TypeVar

import grpc
import grpc.aio

LEASE_METADATA_KEY = "x-tandem-lease"
"""The gRPC metadata key of the fencing token."""
FENCED_METADATA_KEY = "tandem-newest-lease"
"""The trailing metadata of FAILED_PRECONDITION: the newest token that the worker has seen."""

_Request = TypeVar("_Request")
_Reply = TypeVar("_Reply")


class Fence:
    """Refuses calls to one worker under a lease that is not the newest. For its event loop alone.
    `token` 0: it is not leased, and always awake."""

    def __init__(self, token: int) -> None:
        self._newest = token
        self.leased = token > 0
        self.asleep = False

    async def check(self, context: grpc.aio.ServicerContext[_Request, _Reply]) -> None:
        """Abort a call that needs the devices unless it has the lease and the worker is awake."""
        if not self.leased:
            return
        token = self._token_of(context)
        if token != self._newest or self.asleep:
            state = "asleep" if self.asleep else "awake"
            await self._refuse(context, token, f"it is {state}")

    async def admit(self, context: grpc.aio.ServicerContext[_Request, _Reply]) -> None:
        """Note the token of a Sleep or a Wake; abort it if it is older than another one."""
        token = self._token_of(context)
        if not self.leased or token < self._newest:
            await self._refuse(context, token, "a newer call came before")
        self._newest = token

    def _token_of(self, context: grpc.aio.ServicerContext[_Request, _Reply]) -> int:
        return int(dict(context.invocation_metadata() or ()).get(LEASE_METADATA_KEY, 0))

    async def _refuse(
        self, context: grpc.aio.ServicerContext[_Request, _Reply], token: int, why: str
    ) -> NoReturn:
        await context.abort(
            grpc.StatusCode.FAILED_PRECONDITION,
            f"the worker was called with the lease {token}, its newest is {self._newest}: {why}",
            ((FENCED_METADATA_KEY, str(self._newest)),),
        )
        raise AssertionError("abort raises")
