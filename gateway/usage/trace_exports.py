"""Exports of traces: made in the background, fetched through an address that expires.

What a trace shows comes from the operation log, the table of workers, and the memory of the
last samples; its file lies in DATA/traces until its address has expired.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlencode

from sqlalchemy import RowMapping, select

from gateway.auth.signing import is_signed, sign
from gateway.storage.database import Database
from gateway.storage.tables import operations, runs, sessions, workers
from gateway.usage.chrome_trace import Slice, Track, encode, sample_tracks
from gateway.usage.sample_log import SampleLog
from tandem.errors import AddressExpired, AddressForged, UnknownWeights
from tandem.telemetry import get_log

PREFIX = "/api/v1/trace_files/"

_PURPOSE = "trace"
_PATIENCE = 2.0
"""Seconds to wait for a new trace before the client is told to ask again (in five)."""
_MOST_FILES = 8
"""Of one session, newest kept: whoever may look at it can ask for as many as it likes."""
_FILE = re.compile(r"[A-Za-z0-9_-]{1,80}\.json")


@dataclass(frozen=True)
class Export:
    """Where an export stands; `address` is relative to the server."""

    status: Literal["pending", "ready", "failed"]
    address: str = ""
    error: str = ""


class TraceExporter:
    def __init__(
        self,
        *,
        database: Database,
        samples: SampleLog,
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
        """Begins an export of this session, or says what became of the one under way. One that
        has ended is told of once: who asks again gets a new one."""
        job = self._jobs.get(session_id)
        if job is None:
            job = self._jobs[session_id] = asyncio.create_task(
                self._make(session_id), name=f"trace-{session_id}"
            )
        done, _ = await asyncio.wait({job}, timeout=_PATIENCE)
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
        """Raises `AddressForged`, `AddressExpired`, or `UnknownWeights` for a file that is gone."""
        if not is_signed(self._key, signature, _PURPOSE, file, expires):
            raise AddressForged(
                "this address of a trace was not signed here, or was altered; export it again"
            )
        if time.time() >= int(expires):
            raise AddressExpired("this address of a trace has expired; export it again")
        path = self._folder / file
        if not _FILE.fullmatch(file) or path.is_symlink() or not path.is_file():
            raise UnknownWeights("the file of this trace is gone; export it again")
        return path

    async def expire(self) -> None:
        """Removes the files whose address has expired."""
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
        """Writes the trace; returns the name of its file."""
        await self._database.flush()
        tracks = [
            await self._session(session_id),
            *await self._runs(session_id),
            *sample_tracks(self._samples.of_session(session_id)),
            await self._workers(session_id),
        ]
        about = {"session_id": session_id, "made_by": "tandem", "made_at": time.time()}
        name = f"{session_id}-{secrets.token_hex(8)}.json"

        def write() -> None:
            body = encode([track for track in tracks if track.slices], about=about)
            self._folder.mkdir(parents=True, exist_ok=True)
            files = sorted(self._folder.glob(f"{session_id}-*.json"), key=_written_at)
            for old in files[: 1 - _MOST_FILES]:
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
        columns = (
            operations.c.run_id,
            operations.c.seq_id,
            operations.c.kind,
            operations.c.state,
            operations.c.accepted_at,
            operations.c.ended_at,
            operations.c.error_type,
            operations.c.error,
        )
        rows = await self._database.read(
            select(*columns)
            .join(runs, runs.c.id == operations.c.run_id)
            .where(runs.c.session_id == session_id)
            .order_by(operations.c.run_id, operations.c.seq_id)
        )
        found: dict[str, list[Slice]] = {}
        for row in rows:
            found.setdefault(row["run_id"], []).append(_operation(row))
        return [Track(name=run_id, category="operation", slices=found[run_id]) for run_id in found]

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
        expires = str(int(time.time() + self._ttl))
        signature = sign(self._key, _PURPOSE, file, expires)
        return f"{PREFIX}{file}?{urlencode({'expires': expires, 'signature': signature})}"


def _written_at(file: Path) -> float:
    """Long ago, for a file that is removed at this moment."""
    try:
        return file.lstat().st_mtime
    except FileNotFoundError:
        return 0.0


def _operation(row: RowMapping) -> Slice:
    accepted, ended = row["accepted_at"], row["ended_at"]
    args: dict[str, object] = {
        "request_id": f"{row['run_id']}:{row['seq_id']}",
        "state": row["state"],
    }
    if row["error_type"]:
        args |= {"error": row["error_type"], "message": row["error"]}
    return Slice(
        name=str(row["kind"]),
        start=accepted,
        end=ended if ended is not None else time.time(),
        args=args,
    )
