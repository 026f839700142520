"""Exports a session's timeline as a Chrome trace, which Perfetto and chrome://tracing show.

A trace is made in the background from the operations, the workers and the recent samples of the
session, and fetched through a signed address. Its file lies in DATA/traces until the address
has expired.

Format: the JSON object of the "Trace Event Format" (complete events `ph: "X"`, metadata events
`ph: "M"`; times in microseconds since 1970). A process of the trace is a run, a sampling session
or all the workers; operations that overlap, because clients send ahead, are put into different
threads.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Literal
from urllib.parse import urlencode

import orjson
from sqlalchemy import RowMapping, select

from gateway.auth.signing import check_address, sign_address
from gateway.storage.database import Database
from gateway.storage.tables import operations, runs, sessions, workers
from gateway.usage.samples import RecentSamples, SampleSpan
from tandem.errors import UnknownWeights
from tandem.telemetry import get_log

PREFIX = "/api/v1/trace_files/"

_PURPOSE = "trace"
_WAIT = 2.0
"""Seconds to wait for a new trace before the client is told to ask again (in five)."""
_MAX_FILES = 8
"""Files kept of one session, newest first: clients can ask for as many as they like."""
_FILE = re.compile(r"[A-Za-z0-9_-]{1,80}\.json")
_MICRO = 1e6
_OPERATION_COLUMNS = [
    operations.c[name]
    for name in (
        "run_id",
        "seq_id",
        "kind",
        "state",
        "accepted_at",
        "ended_at",
        "error_type",
        "error",
    )
]
"""Without the requests and results, which can be large."""


@dataclass(frozen=True)
class Slice:
    """Something that took a while: from `start` to `end`, in seconds since 1970."""

    name: str
    start: float
    end: float
    args: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Track:
    """A process of the trace, such as a run, with what happened there."""

    name: str
    category: str
    slices: Sequence[Slice]


@dataclass(frozen=True)
class Export:
    """The state of an export. `address` is relative to the server."""

    status: Literal["pending", "ready", "failed"]
    address: str = ""
    error: str = ""


class TraceExporter:
    def __init__(
        self,
        *,
        database: Database,
        samples: RecentSamples,
        data_dir: Path,
        key: bytes,
        ttl: float,
    ) -> None:
        self._database = database
        self._samples = samples
        self._folder = data_dir / "traces"
        self._key = key
        self._ttl = ttl
        self._jobs: dict[str, asyncio.Task[str]] = {}
        self._log = get_log()

    async def ask(self, session_id: str) -> Export:
        """Start an export of this session, or return the state of the one under way. A finished
        export is returned once; the next call starts a new one."""
        job = self._jobs.get(session_id)
        if job is None:
            job = self._jobs[session_id] = asyncio.create_task(
                self._make(session_id), name=f"trace-{session_id}"
            )
        done, _ = await asyncio.wait({job}, timeout=_WAIT)
        if not done:
            return Export(status="pending")
        if self._jobs.get(session_id) is job:
            del self._jobs[session_id]
        error = job.exception()
        if error is not None:
            self._log.error("trace_failed", session_id=session_id, error=str(error))
            return Export(status="failed", error=f"{type(error).__name__}: {error}")
        return Export(status="ready", address=self._address(job.result()))

    def find(self, *, file: str, expires: str, signature: str) -> Path:
        """Return the file behind a signed address. Raise `AddressForged`, `AddressExpired`, or
        `UnknownWeights` for a file that is gone."""
        check_address(
            self._key,
            _PURPOSE,
            file,
            expires=expires,
            signature=signature,
            what="this address of a trace",
            renew="export it again",
        )
        path = self._folder / file
        if not _FILE.fullmatch(file) or path.is_symlink() or not path.is_file():
            raise UnknownWeights("the file of this trace is gone; export it again")
        return path

    async def expire(self) -> None:
        """Remove the files whose address has expired."""
        cutoff = time.time() - self._ttl

        def sweep() -> None:
            for path in self._folder.iterdir() if self._folder.is_dir() else ():
                if _written_at(path) < cutoff:
                    path.unlink(missing_ok=True)

        await asyncio.to_thread(sweep)

    async def close(self) -> None:
        for job in self._jobs.values():
            job.cancel()
        await asyncio.gather(*self._jobs.values(), return_exceptions=True)
        self._jobs.clear()

    async def _make(self, session_id: str) -> str:
        """Write the trace, and return the name of its file."""
        await self._database.flush()
        tracks = [
            await self._session(session_id),
            *await self._runs(session_id),
            *_sample_tracks(self._samples.of_session(session_id)),
            await self._workers(session_id),
        ]
        about = {"session_id": session_id, "made_by": "tandem", "made_at": time.time()}
        name = f"{session_id}-{secrets.token_hex(8)}.json"

        def write() -> None:
            body = encode([track for track in tracks if track.slices], about=about)
            self._folder.mkdir(parents=True, exist_ok=True)
            files = sorted(self._folder.glob(f"{session_id}-*.json"), key=_written_at)
            for old in files[: 1 - _MAX_FILES]:
                old.unlink(missing_ok=True)
            (self._folder / name).write_bytes(body)

        await asyncio.to_thread(write)
        return name

    async def _session(self, session_id: str) -> Track:
        row = await self._database.read_one(select(sessions).where(sessions.c.id == session_id))
        assert row is not None, "the route has looked it up"
        life = Slice(
            name=row["display_name"] or session_id,
            start=row["created_at"],
            end=row["ended_at"] or time.time(),
            args={"state": row["state"], "reason": row["reason"], "detail": row["detail"]},
        )
        return Track(name=f"session {session_id}", category="session", slices=[life])

    async def _runs(self, session_id: str) -> list[Track]:
        rows = await self._database.read(
            select(*_OPERATION_COLUMNS)
            .join(runs, runs.c.id == operations.c.run_id)
            .where(runs.c.session_id == session_id)
            .order_by(operations.c.run_id, operations.c.seq_id)
        )
        return [
            Track(name=run_id, category="operation", slices=[_operation(row) for row in group])
            for run_id, group in groupby(rows, key=lambda row: str(row["run_id"]))
        ]

    async def _workers(self, session_id: str) -> Track:
        rows = await self._database.read(
            select(workers).where(workers.c.session_id == session_id).order_by(workers.c.started_at)
        )
        slices = [
            Slice(
                name=row["id"],
                start=row["started_at"],
                end=row["ended_at"] or time.time(),
                args={"kind": row["kind"], "state": row["state"], "reason": row["reason"]},
            )
            for row in rows
        ]
        return Track(name="workers", category="worker", slices=slices)

    def _address(self, file: str) -> str:
        query = sign_address(self._key, _PURPOSE, file, expires=int(time.time() + self._ttl))
        return f"{PREFIX}{file}?{urlencode(query)}"


def encode(tracks: Iterable[Track], *, about: dict[str, object]) -> bytes:
    """Return the trace as JSON. `about` becomes its `otherData`."""
    events: list[dict[str, object]] = []
    for pid, track in enumerate(tracks, start=1):
        events.append(_named("process_name", track.name, pid=pid))
        placed = assign_threads(track.slices)
        threads = range(1 + max((thread for thread, _ in placed), default=-1))
        events += [
            _named("thread_name", f"{track.category} {tid}", pid=pid, tid=tid) for tid in threads
        ]
        events += [
            {
                "ph": "X",
                "name": one.name,
                "cat": track.category,
                "pid": pid,
                "tid": thread,
                "ts": round(one.start * _MICRO),
                "dur": max(0, round((one.end - one.start) * _MICRO)),
                "args": one.args,
            }
            for thread, one in placed
        ]
    return orjson.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": about})


def assign_threads(slices: Iterable[Slice]) -> list[tuple[int, Slice]]:
    """Return each slice, by start, with the first thread that is free at its time."""
    free_at: list[float] = []
    placed = []
    for one in sorted(slices, key=lambda s: (s.start, s.end)):
        thread = next((n for n, until in enumerate(free_at) if until <= one.start), len(free_at))
        free_at[thread : thread + 1] = [one.end]
        placed.append((thread, one))
    return placed


def _named(what: str, name: str, **ids: int) -> dict[str, object]:
    return {"ph": "M", "name": what, **ids, "args": {"name": name}}


def _sample_tracks(spans: Iterable[SampleSpan]) -> list[Track]:
    """Return a track for each sampling session."""
    found: dict[str, list[Slice]] = {}
    for span in spans:
        sampling_session_id, _, number = span.request_id.rpartition(":")
        args: dict[str, object] = {
            "request_id": span.request_id,
            "seq_id": int(number),
            "weight_version": span.weight_version,
            "prompt_tokens": span.prompt_tokens,
            "cached_tokens": span.cached_tokens,
            "sampled_tokens": span.sampled_tokens,
        }
        if span.error:
            args["error"] = span.error
        found.setdefault(sampling_session_id, []).append(
            Slice("sample", start=span.started_at, end=span.started_at + span.seconds, args=args)
        )
    return [Track(name=name, category="sample", slices=found[name]) for name in sorted(found)]


def _operation(row: RowMapping) -> Slice:
    args = {"request_id": f"{row['run_id']}:{row['seq_id']}", "state": row["state"]}
    if row["error_type"]:
        args |= {"error": row["error_type"], "message": row["error"]}
    ended_at = row["ended_at"] if row["ended_at"] is not None else time.time()
    return Slice(row["kind"], start=row["accepted_at"], end=ended_at, args=args)


def _written_at(file: Path) -> float:
    """Return when the file was written; 0 for one that is removed at this moment."""
    try:
        return file.lstat().st_mtime
    except FileNotFoundError:
        return 0.0
