"""The gateway's epoch. Its calls to agents and workers carry it."""

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
    """`superseded` is called when a worker refuses a call because another gateway took over."""

    number: int
    superseded: Callable[[], object]

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return ((EPOCH_METADATA_KEY, str(self.number)),)

    def raise_if_superseded(self, error: grpc.aio.AioRpcError) -> None:
        """Raise `GatewaySuperseded` if that is the cause of the error."""
        if NEWEST_EPOCH_METADATA_KEY in dict(error.trailing_metadata() or ()):
            reason = error.details() or ""
            get_log().error("superseded", epoch=self.number, reason=reason)
            self.superseded()
            raise GatewaySuperseded(reason) from error


def epoch_without_leader(*, of_cluster: bool = False) -> int:
    """Return the epoch of a gateway with SQLite, which needs no leader.

    It is the machine's uptime in milliseconds. A changed clock does not lower it, and agents and
    workers end with the machine. Pods do not, so a cluster uses milliseconds since 1970."""
    return (time.time_ns() if of_cluster else time.monotonic_ns()) // 10**6
