"""How an operation reaches its run's trainer: its place in the log, and what happens when the
connection breaks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

import orjson

from gateway.futures.table import Result
from gateway.runs.dispatcher import Call, EndsRun
from gateway.runs.operations import Operation
from gateway.usage.meter import RunMeter, TrainerReply
from gateway.workers.clients import WorkerUnavailable
from tandem.errors import InternalError, TandemError
from tandem.telemetry import get_log
from tandem.v1 import common_pb2

Reply = TypeVar("Reply", bound=TrainerReply)

_REDELIVERIES = 2


@dataclass
class RunProgress:
    """What a run's operations change and need. `parent` is the newest version, which is pinned."""

    run_id: str
    session_id: str
    base_model: str
    step: int = 0
    published: int = 0
    parent: str = ""
    newest: str = ""
    version_bytes: int = 0
    trainable_parameters: int = 0

    @property
    def expected_version_bytes(self) -> int:
        """Of the next weight version: as the last one, or at most 4 bytes a parameter."""
        return self.version_bytes or 4 * self.trainable_parameters

    @property
    def expected_state_bytes(self) -> int:
        """Of a trainer's state: the parameters and two moments of each, 4 bytes each."""
        return max(12 * self.trainable_parameters, 3 * self.version_bytes)


class Delivery:
    """`fate` waits for the launcher's word after the connection broke: the error that ended the
    run, or None when the trainer lives after all."""

    def __init__(
        self,
        *,
        facts: RunProgress,
        meter: RunMeter,
        fate: Callable[[], Awaitable[TandemError | None]],
    ) -> None:
        self._facts = facts
        self._meter = meter
        self._fate = fate
        self._log = get_log(session_id=facts.session_id, run_id=facts.run_id)

    async def deliver(self, operation: Operation, send: Callable[[], Awaitable[Reply]]) -> Reply:
        """Calls the trainer. A broken connection to a living trainer is tried again, since the
        trainer answers what it has applied already from memory; else the run is over."""
        for attempt in range(_REDELIVERIES + 1):
            try:
                reply = await send()
                self._meter.note(operation.usage_kind, reply)
                return reply
            except WorkerUnavailable as error:
                if (fate := await self._fate()) is not None:
                    raise EndsRun(fate) from error
                self._log.warning("redelivering", attempt=attempt, reason=str(error))
            except TandemError as error:
                raise EndsRun(error) from error
        raise EndsRun(InternalError("the connection to the trainer broke again and again"))

    def header(self, operation: Operation, call: Call) -> common_pb2.OperationHeader:
        return common_pb2.OperationHeader(
            operation_id=operation.future.request_id,
            session_id=self._facts.session_id,
            run_id=self._facts.run_id,
            # The trainer counts the places of the log from 1, the creation of the run, which
            # may be a load, included; the client counts what comes after it.
            seq_id=operation.seq_id + 1,
            previous_seq_id=call.previous_seq_id + 1 if call.previous_seq_id >= 0 else 0,
        )


def json_result(**fields: object) -> Result:
    return Result(media="json", body=orjson.dumps(fields))
