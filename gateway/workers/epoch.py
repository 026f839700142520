"""The epoch of this gateway, which its calls to the agent and the workers carry."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import grpc.aio

from tandem.errors import GatewaySuperseded
from tandem.protocol.epoch import EPOCH_METADATA_KEY, NEWEST_EPOCH_METADATA_KEY
from tandem.telemetry import get_log


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """`superseded` is called when a call is refused because another gateway has taken over."""

    number: int
    superseded: Callable[[], object]

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return ((EPOCH_METADATA_KEY, str(self.number)),)

    def check(self, error: grpc.aio.AioRpcError) -> None:
        """Raise `GatewaySuperseded` if that is why a call failed."""
        if NEWEST_EPOCH_METADATA_KEY in dict(error.trailing_metadata() or ()):
            reason = error.details() or ""
            get_log().error("superseded", epoch=self.number, reason=reason)
            self.superseded()
            raise GatewaySuperseded(reason) from error


def epoch_without_lease(*, of_cluster: bool = False) -> int:
    """Return the epoch of a gateway with SQLite, which the lock of the data directory keeps alone:
    the milliseconds since this machine started, which its agent and its workers do not outlive. No
    clock that is set back makes it lower than the one before, which nothing has noted. Pods `of` a
    `cluster` outlive it: for them it is the milliseconds since 1970."""
    return (time.time_ns() if of_cluster else time.monotonic_ns()) // 10**6
