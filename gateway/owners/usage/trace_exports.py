"""Exports a session as a Chrome trace for Perfetto and chrome://tracing.

A signed address serves the trace, generated in batches during the download. It ends at the time of
signing.

Format: the JSON object of the "Trace Event Format" with complete events (`ph: "X"`) and metadata
events (`ph: "M"`), in microseconds since 1970. A process is a run, a sampling session or all
workers. Overlapping operations get different threads. `RUN time` has bars of each optimizer step's
time shares. Their lengths are true, their order within the step is not."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from urllib.parse import urlencode

import orjson
from sqlalchemy import RowMapping, select

from gateway.owners.auth.signing import check_address, sign_address
from gateway.owners.usage.meter import SampleMeter, SampleSpan
from gateway.owners.usage.time_shares import SHARES
from gateway.storage.database import Database
from gateway.storage.tables import operations, runs, sessions, training_steps, worker_events

PREFIX = "/api/v1/trace_files/"

_PURPOSE = "trace"
_BATCH = 500
_MICRO = 1e6
_OPERATION_COLUMNS = (
    operations.c.run_id,
    operations.c.seq_id,
    operations.c.kind,
    operations.c.state,
    operations.c.accepted_at,
    operations.c.ended_at,
    operations.c.error_type,
    operations.c.error,
)
"""Without payloads and calls, of which a batch may have 64 MiB."""


@dataclass(frozen=True)
class Slice:
    """An interval from `start` to `end`, in seconds since 1970. `track` is its process in the
    trace."""

    track: str
    category: str
    name: str
    start: float
    end: float
    args: dict[str, object] = field(default_factory=dict)


@dataclass(eq=False, repr=False, kw_only=True)
class TraceExporter:
    """An address is valid for `ttl` seconds."""

    database: Database
    samples: SampleMeter
    key: bytes
    ttl: float = 3600.0

    def address(self, session_id: str) -> str:
        now = time.time()
        file = f"{session_id}-{now}.json"
        query = sign_address(self.key, _PURPOSE, file, expires=int(now + self.ttl))
        return f"{PREFIX}{file}?{urlencode(query)}"

    def generate(self, *, file: str, expires: str, signature: str) -> AsyncIterator[bytes]:
        """Return the JSON of a trace. Raises `AddressForged` or `AddressExpired`."""
        check_address(
            self.key,
            _PURPOSE,
            file,
            expires=expires,
            signature=signature,
            what="this address of a trace",
            renew="export it again",
        )
        session_id, _, until = file.removesuffix(".json").rpartition("-")
        return self._generate(session_id, float(until))

    async def _generate(self, session_id: str, until: float) -> AsyncIterator[bytes]:
        about = {"session_id": session_id, "made_by": "tandem", "made_at": until}
        encoder = EventEncoder()
        await self.database.flush()
        yield b'{"displayTimeUnit":"ms","otherData":%b,"traceEvents":[' % orjson.dumps(about)
        async for slices in self._batches(session_id, until):
            yield encoder.encode(one for one in slices if one.start <= until)
        yield b"]}"

    async def _batches(self, session_id: str, until: float) -> AsyncIterator[Iterable[Slice]]:
        for row in await self.database.read(select(sessions).where(sessions.c.id == session_id)):
            yield [_session(row)]
        began = (
            select(*_OPERATION_COLUMNS)
            .join(runs, runs.c.id == operations.c.run_id)
            .where(runs.c.session_id == session_id, operations.c.accepted_at <= until)
        )
        key = (operations.c.run_id, operations.c.seq_id)
        async for rows in self.database.read_in_batches(began, *key):
            yield map(_operation, rows)
        steps = (
            select(training_steps)
            .join(runs, runs.c.id == training_steps.c.run_id)
            .where(runs.c.session_id == session_id, training_steps.c.at <= until)
        )
        key = (training_steps.c.run_id, training_steps.c.seq_id)
        async for rows in self.database.read_in_batches(steps, *key):
            yield (one for row in rows for one in _time_shares(row))
        spans = self.samples.of_session(session_id)
        for start in range(0, len(spans), _BATCH):
            yield map(_sample, spans[start : start + _BATCH])
        changes = select(worker_events).where(
            worker_events.c.session_id == session_id, worker_events.c.at <= until
        )
        lasting: dict[str, RowMapping] = {}
        key = (worker_events.c.at, worker_events.c.id)
        async for rows in self.database.read_in_batches(changes, *key):
            yield _ended_states(rows, lasting)
        yield (_worker_state(row, time.time()) for row in lasting.values())


class EventEncoder:
    def __init__(self) -> None:
        self._tracks: dict[str, tuple[int, list[tuple[float, int]]]] = {}
        """By track: its pid, and a heap of its threads (time when free, tid)."""
        self._separator = b""

    def encode(self, slices: Iterable[Slice]) -> bytes:
        """Return the slices as further elements of the JSON list. Each track gets a process, and
        each slice a thread that is free at its start."""
        content = []
        for event in (event for one in slices for event in self._events(one)):
            content += [self._separator, orjson.dumps(event)]
            self._separator = b",\n"
        return b"".join(content)

    def _events(self, one: Slice) -> Iterable[dict[str, object]]:
        if one.track not in self._tracks:
            self._tracks[one.track] = (1 + len(self._tracks), [])
            yield _named("process_name", one.track, pid=len(self._tracks))
        pid, threads = self._tracks[one.track]
        if threads and threads[0][0] <= one.start:
            _, tid = heappop(threads)
        else:
            tid = len(threads)
            yield _named("thread_name", f"{one.category} {tid}", pid=pid, tid=tid)
        heappush(threads, (one.end, tid))
        yield {
            "ph": "X",
            "name": one.name,
            "cat": one.category,
            "pid": pid,
            "tid": tid,
            "ts": round(one.start * _MICRO),
            "dur": max(0, round((one.end - one.start) * _MICRO)),
            "args": one.args,
        }


def _named(what: str, name: str, **ids: int) -> dict[str, object]:
    return {"ph": "M", "name": what, **ids, "args": {"name": name}}


def _session(row: RowMapping) -> Slice:
    return Slice(
        track=f"session {row['id']}",
        category="session",
        name=row["display_name"] or row["id"],
        start=row["created_at"],
        end=row["ended_at"] or time.time(),
        args=_some(row, "state", "reason", "detail"),
    )


def _operation(row: RowMapping) -> Slice:
    args = {"request_id": f"{row['run_id']}:{row['seq_id']}", "state": row["state"]}
    if row["error_type"]:
        args |= {"error": row["error_type"], "message": row["error"]}
    return Slice(
        track=row["run_id"],
        category="operation",
        name=row["kind"],
        start=row["accepted_at"],
        end=row["ended_at"] or time.time(),
        args=args,
    )


def _time_shares(row: RowMapping) -> Iterator[Slice]:
    seconds = {name: row["metrics"].get(f"seconds/{name}") or 0.0 for name in SHARES}
    at = row["at"] - sum(seconds.values())
    for name, share in seconds.items():
        if share:
            track = f"{row['run_id']} time"
            yield Slice(track, "time", name, at, at + share, {"step": row["step"]})
            at += share


def _sample(span: SampleSpan) -> Slice:
    sampling_session_id, _, number = span.request_id.rpartition(":")
    names = ["request_id", "weight_version", "prompt_tokens", "cached_tokens", "sampled_tokens"]
    if span.error:
        names.append("error")
    return Slice(
        track=sampling_session_id,
        category="sample",
        name="sample",
        start=span.started_at,
        end=span.started_at + span.seconds,
        args={"seq_id": int(number), **{name: getattr(span, name) for name in names}},
    )


def _ended_states(rows: Iterable[RowMapping], lasting: dict[str, RowMapping]) -> Iterator[Slice]:
    """Yield the states of workers that these changes have ended. `lasting` has the states that go
    on, by worker."""
    for row in rows:
        if (before := lasting.pop(row["key"], None)) is not None:
            yield _worker_state(before, row["at"])
        if row["state"] != "gone":
            lasting[row["key"]] = row


def _worker_state(row: RowMapping, end: float) -> Slice:
    return Slice(
        track="workers",
        category="worker",
        name=f"{row['key']} {row['state']}",
        start=row["at"],
        end=end,
        args=_some(row, "kind", "group_name", "reason"),
    )


def _some(row: RowMapping, *columns: str) -> dict[str, object]:
    return {column: row[column] for column in columns}
