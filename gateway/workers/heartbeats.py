"""Heartbeats find silent workers and workers of another version."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import grpc.aio

from gateway.workers.worker import Worker, WorkerRecord
from tandem.protocol.worker import (
    PROTOCOL,
    PROTOCOL_METADATA_KEY,
    VERSION_METADATA_KEY,
    own_version,
)
from tandem.settings.gateway import GatewaySettings
from tandem.telemetry import get_log

MOST_SECONDS = 5.0
_ASKED_BEFORE = 5


def heartbeat_seconds(settings: GatewaySettings) -> float:
    """Return the seconds between heartbeats. A worker silent for twice that is shown as
    unresponsive."""
    return min(MOST_SECONDS, settings.worker_unresponsive_timeout / _ASKED_BEFORE)


@dataclass(kw_only=True)
class Heartbeats:
    """Asks all workers in `records`, a live mapping by id. `give_up` gets a useless worker and the
    reason. `changed` is called when a worker becomes silent, and when it answers again."""

    settings: GatewaySettings
    records: Mapping[str, WorkerRecord]
    give_up: Callable[[Worker, str], None]
    changed: Callable[[], None] = lambda: None

    async def ask_all(self) -> None:
        """Ask all workers again and again. Note each silent worker."""
        while True:
            await asyncio.sleep(heartbeat_seconds(self.settings))
            ready = [(r, r.worker) for r in self.records.values() if r.worker is not None]
            asked = (self._ask(record, worker) for record, worker in ready)
            for fault in await asyncio.gather(*asked, return_exceptions=True):
                if isinstance(fault, Exception):  # its channel was closed
                    get_log().error("heartbeat_failed", exc_info=fault)

    async def _ask(self, record: WorkerRecord, worker: Worker) -> None:
        asked_at, answers = time.monotonic(), True
        try:
            about = await worker.check_health(timeout=2 * heartbeat_seconds(self.settings))
            self._note_version(record, worker, about)
        except grpc.aio.AioRpcError as error:  # any other error is an answer or the worker's end
            answers = error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED
        if answers == (worker.silent_since is None):
            return
        worker.silent_since, record.state = (
            (None, "ready") if answers else (asked_at, "unresponsive")
        )
        self.changed()
        get_log().warning(
            "worker_answers_again" if answers else "worker_unresponsive",
            worker_id=worker.worker_id,
            session_id=record.session_id,
            run_id=record.run_id,
        )

    def _note_version(self, record: WorkerRecord, worker: Worker, about: dict[str, str]) -> None:
        """Log a worker of another version, and give up one with another protocol, since its
        replacement runs today's image."""
        if record.version or VERSION_METADATA_KEY not in about:
            return
        record.version = about[VERSION_METADATA_KEY]
        protocol = about[PROTOCOL_METADATA_KEY]
        if record.version != own_version():
            get_log().warning(
                "worker_of_another_version",
                worker_id=record.worker_id,
                version=record.version,
                protocol=protocol,
                own_version=own_version(),
            )
        if protocol != str(PROTOCOL):
            self.give_up(
                worker,
                f"the {record.kind} has Tandem {record.version}, whose protocol is {protocol}, and "
                f"that of the gateway is {PROTOCOL}",
            )
