"""What was used, added up by hour, subject and kind of event.

Counting happens in memory and never waits: sums go into the database every few seconds, and
all that is lost when the gateway is killed is the last of these intervals. A subject is a
training run or a sampling session. Accelerator seconds are those of workers: a trainer's own
seconds times its ranks, and for a sampler the time in which it worked, shared out between the
samples that it worked on (`SharedClock`), so that a sum is never more than the machines had.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from sqlalchemy import BigInteger, String, and_, bindparam, exists, insert, select, update
from sqlalchemy.sql.elements import BindParameter

from gateway.sessions.registry import SessionRegistry
from gateway.storage.database import Database
from gateway.storage.tables import usage
from tandem.v1 import trainer_pb2

UsageKind = Literal[
    "forward",
    "forward_backward",
    "optim_step",
    "sample",
    "publish",
    "save_weights",
    "save_weights_for_sampler",
    "save_weights_external",
    "load_weights",
]

HOUR = 3600

_MOST_UNWRITTEN = 4096
"""Sums that wait in memory; when there are more, they are written at once."""


@dataclass(frozen=True)
class Subject:
    """What a usage is of: a training run or a sampling session."""

    id: str
    session_id: str
    base_model: str


@dataclass
class _Sum:
    session_id: str
    owner: str
    base_model: str
    count: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    accelerator_seconds: float = 0.0


_Key = tuple[int, str, str]


def _param(name: str, type_: type[BigInteger] | type[String]) -> BindParameter[object]:
    return bindparam(f"this_{name}", type_=type_)


_THIS = and_(
    usage.c.hour == _param("hour", BigInteger),
    usage.c.event == _param("event", String),
    usage.c.subject == _param("subject", String),
)
_NAMES = ("hour", "event", "subject", "session_id", "owner", "base_model")
_SUMS = ("count", "input_tokens", "cached_tokens", "output_tokens", "accelerator_seconds")
_ENSURE = insert(usage).from_select(
    [*_NAMES, *_SUMS],
    select(
        *(_param(name, BigInteger if name == "hour" else String) for name in _NAMES),
        *(bindparam(f"zero_{name}", 0, type_=usage.c[name].type) for name in _SUMS),
    ).where(~exists().where(_THIS)),
)
"""Makes the row of a sum that has none yet. (A portable form of "on conflict do nothing".)"""
_ADD = (
    update(usage)
    .where(_THIS)
    .values(
        {
            name: usage.c[name] + bindparam(f"more_{name}", type_=usage.c[name].type)
            for name in _SUMS
        }
    )
)


class UsageMeter:
    def __init__(
        self,
        *,
        database: Database,
        sessions: SessionRegistry,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._database = database
        self._sessions = sessions
        self._clock = clock
        self._sums: dict[_Key, _Sum] = {}

    def record(
        self,
        kind: UsageKind,
        subject: Subject,
        *,
        input_tokens: int = 0,
        cached_tokens: int = 0,
        output_tokens: int = 0,
        accelerator_seconds: float = 0.0,
    ) -> None:
        """Counts one event. `cached_tokens` are those of the input that were not computed."""
        hour = int(self._clock()) // HOUR * HOUR
        key = (hour, kind, subject.id)
        found = self._sums.get(key)
        if found is None:
            if len(self._sums) >= _MOST_UNWRITTEN:
                self.write()
            found = self._sums[key] = _Sum(
                session_id=subject.session_id,
                owner=self._sessions.owner_of(subject.session_id),
                base_model=subject.base_model,
            )
        found.count += 1
        found.input_tokens += input_tokens
        found.cached_tokens += cached_tokens
        found.output_tokens += output_tokens
        found.accelerator_seconds += accelerator_seconds

    def write(self) -> None:
        """Hands over what was counted since the last time, without waiting."""
        sums, self._sums = self._sums, {}
        if not sums:
            return
        rows = [
            {
                "this_hour": hour,
                "this_event": kind,
                "this_subject": subject,
                "this_session_id": one.session_id,
                "this_owner": one.owner,
                "this_base_model": one.base_model,
            }
            for (hour, kind, subject), one in sums.items()
        ]
        self._database.write_soon(_ENSURE, *rows)
        self._database.write_soon(
            _ADD,
            *(
                {
                    "this_hour": hour,
                    "this_event": kind,
                    "this_subject": subject,
                    **{f"more_{name}": getattr(one, name) for name in _SUMS},
                }
                for (hour, kind, subject), one in sums.items()
            ),
        )


TrainerReply = (
    trainer_pb2.ForwardBackwardReply
    | trainer_pb2.OptimStepReply
    | trainer_pb2.PublishReply
    | trainer_pb2.SaveCheckpointReply
    | trainer_pb2.LoadCheckpointReply
)


class RunMeter:
    """Counts what a run's trainer did, from its replies; `ranks` devices work at once."""

    def __init__(self, *, usage: UsageMeter, subject: Subject, ranks: int) -> None:
        self._usage = usage
        self._subject = subject
        self._ranks = max(1, ranks)

    def note(self, kind: UsageKind, reply: TrainerReply) -> None:
        if reply.HasField("failure"):
            return
        tokens = reply.tokens if isinstance(reply, trainer_pb2.ForwardBackwardReply) else 0
        self._usage.record(
            kind,
            self._subject,
            input_tokens=tokens,
            accelerator_seconds=reply.seconds * self._ranks,
        )


class SharedClock:
    """Shares the time in which a worker works between what it works on at once.

    While n things are under way, each of them is given 1/n of the time that passes: the shares
    of all add up to the time in which there was any. Costs the same however many there are.

    Literal example: two samples that begin together and take 4 s each are given 2 s each.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._under_way = 0
        self._share = 0.0
        self._at = clock()

    def start(self) -> float:
        """The mark to give to `stop`."""
        self._advance()
        self._under_way += 1
        return self._share

    def stop(self, mark: float) -> float:
        """The seconds that fell to what was started with this mark."""
        self._advance()
        self._under_way -= 1
        return self._share - mark

    def _advance(self) -> None:
        now = self._clock()
        if self._under_way:
            self._share += (now - self._at) / self._under_way
        self._at = now
