"""The traces of all owners, each in a file of the private directory.

A file's first line is a `TraceHead`, and each other one a turn. An answer is given after its turn
is on the disk, so a new gateway continues all traces. The name of a full trace's file ends in
`.full.jsonl`. Traces in memory are a cache of the files."""

from __future__ import annotations

import asyncio
import hmac
import os
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import BaseModel

from gateway.owners.auth.keys import digest_of
from gateway.owners.limits import Quotas
from gateway.recorder.conversation import Conversations, RecordedTurn, decode_turn, encode_turn
from tandem.errors import StorageFailed, TraceEnded, UnknownTrace, describe
from tandem.telemetry import get_log
from tandem.weights.store import fsync_path, make_folder

TRACE_TTL = 86_400.0
"""Seconds during which a trace takes turns."""
TRACE_BYTES = 64 * 2**20
_READABLE = 86_400.0
"""Seconds during which an ended trace can still be read."""
_CACHED_BYTES = 256 * 2**20
"""The most memory for turns, together."""
_ID = "tr-"
_FULL = ".full.jsonl"


class TraceHead(BaseModel):
    """`digest` is the SHA-256 of the trace's key, in hex. `key_id` is the owner's key that made the
    trace. `fields` are for requests that do not set them. Times are in seconds since 1970."""

    id: str
    owner: str
    key_id: str
    model: str
    digest: str
    created_at: float
    expires_at: float
    fields: dict[str, object] = {}


@dataclass(eq=False, kw_only=True)
class Trace:
    """An owner's trace. `bytes` is the size of its file. `conversations` is None unless the turns
    are in memory. `full` says that a turn did not fit."""

    head: TraceHead
    file: Path
    bytes: int
    conversations: Conversations | None = None
    full: bool = False
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass(eq=False, kw_only=True)
class TraceStore:
    folder: Path
    limits: Quotas
    clock: Callable[[], float] = time.time
    _traces: dict[str, Trace] = field(default_factory=dict, init=False)
    _cached: OrderedDict[str, Trace] = field(default_factory=OrderedDict, init=False)
    _cached_bytes: int = field(default=0, init=False)

    async def find_traces(self) -> None:
        """Find the traces of earlier gateways. Their turns are read when they are needed."""
        self._traces = await asyncio.to_thread(self._find_files)

    def _find_files(self) -> dict[str, Trace]:
        with suppress(FileExistsError):
            make_folder(self.folder, mode=0o700)
        found = {}
        for file in sorted(self.folder.glob(f"{_ID}*.jsonl")):
            try:
                with file.open("rb") as lines:
                    head = TraceHead.model_validate_json(lines.readline())
            except (OSError, ValueError) as error:
                get_log().warning("trace_not_read", file=file.name, reason=describe(error))
                continue
            found[head.id] = Trace(
                head=head,
                file=file,
                bytes=file.stat().st_size,
                full=file.name.endswith(_FULL),
            )
        return found

    async def create_trace(
        self, *, owner: str, key_id: str, model: str, fields: dict[str, object]
    ) -> tuple[Trace, str]:
        """Return a new trace and its key, which is not stored. Raises `LimitExceeded`."""
        used = sum(trace.head.owner == owner for trace in self._traces.values())
        self.limits.check("traces", owner=owner, used=used)
        secret, now = f"tml-trace-{secrets.token_urlsafe(32)}", self.clock()
        head = TraceHead(
            id=f"{_ID}{secrets.token_hex(8)}",
            owner=owner,
            key_id=key_id,
            model=model,
            digest=digest_of(secret.encode()).hex(),
            created_at=now,
            expires_at=now + TRACE_TTL,
            fields=fields,
        )
        line = head.model_dump_json().encode() + b"\n"
        trace = Trace(head=head, file=self.folder / f"{head.id}.jsonl", bytes=len(line))
        trace.conversations = Conversations()
        self._traces[head.id] = trace
        try:
            await asyncio.to_thread(_append, trace.file, line, at=0)
        except OSError as error:
            del self._traces[head.id]
            with suppress(OSError):
                await asyncio.to_thread(trace.file.unlink)
            raise StorageFailed(f"the trace was not written: {error.strerror}") from error
        self._note_use(trace)
        return trace, secret

    def find_by_key(self, trace_id: str, secret: bytes) -> Trace | None:
        """Return the trace if this is its key, even if it has ended."""
        trace = self._traces.get(trace_id)
        digest = digest_of(secret).hex()
        return trace if trace and hmac.compare_digest(trace.head.digest, digest) else None

    def require_trace(self, trace_id: str) -> Trace:
        """Return a trace of any owner. Raises `UnknownTrace`."""
        if (trace := self._traces.get(trace_id)) is None:
            raise unknown_trace(trace_id)
        return trace

    def check_open(self, trace: Trace) -> None:
        """Raise `TraceEnded` if the trace takes no more turns."""
        if trace.head.expires_at <= self.clock():
            raise TraceEnded(f"the trace {trace.head.id} has expired; create another one")
        if trace.full:
            raise _full(trace)

    async def read_turns(self, trace: Trace) -> Conversations:
        """Return the trace's turns."""
        async with trace.lock:
            return await self._read(trace)

    async def add_turns(self, trace: Trace, turns: Sequence[RecordedTurn]) -> None:
        """Write turns, and return when they are on the disk. The client's end does not stop the
        write, because the next one waits for it. Raises `TraceEnded` if the trace has no room,
        `UnknownTrace` if it was deleted meanwhile, and `StorageFailed`."""
        await asyncio.shield(asyncio.ensure_future(self._add_turns(trace, turns)))

    async def _add_turns(self, trace: Trace, turns: Sequence[RecordedTurn]) -> None:
        async with trace.lock:
            conversations = await self._read(trace)
            lines = await asyncio.to_thread(lambda: b"".join(map(encode_turn, turns)))
            if trace.bytes + len(lines) > TRACE_BYTES:
                trace.full = True
                with suppress(OSError):  # then only this gateway knows
                    trace.file = await asyncio.to_thread(_mark_full, trace.file)
                raise _full(trace)
            try:
                await asyncio.to_thread(_append, trace.file, lines, at=trace.bytes)
            except OSError as error:
                raise StorageFailed(f"the turn was not recorded: {error.strerror}") from error
            trace.bytes += len(lines)
            for turn in turns:
                conversations.add_turn(turn)
                self._cached_bytes += turn.size

    async def remove_trace(self, trace: Trace) -> None:
        async with trace.lock:
            self._traces.pop(trace.head.id, None)
            self._forget(trace)
            await asyncio.to_thread(trace.file.unlink, missing_ok=True)

    async def expire_traces(self) -> None:
        """Remove traces that ended long ago."""
        now = self.clock()
        for trace in [*self._traces.values()]:
            if trace.head.expires_at + _READABLE <= now:
                await self.remove_trace(trace)

    async def _read(self, trace: Trace) -> Conversations:
        if self._traces.get(trace.head.id) is not trace:
            raise unknown_trace(trace.head.id)
        if (found := trace.conversations) is not None:
            self._note_use(trace)
            return found
        try:
            read, trace.bytes = await asyncio.to_thread(_read_file, trace.file)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StorageFailed(
                f"the trace {trace.head.id} cannot be read: {describe(error)}"
            ) from error
        trace.conversations = read
        self._note_use(trace)
        return read

    def _note_use(self, trace: Trace) -> None:
        """Keep the trace's turns in memory. Above the bound, forget the turns of the least recently
        used traces. Their files have all turns."""
        if trace.head.id not in self._cached and trace.conversations is not None:
            self._cached_bytes += trace.conversations.size
        self._cached[trace.head.id] = trace
        self._cached.move_to_end(trace.head.id)
        while self._cached_bytes > _CACHED_BYTES and len(self._cached) > 1:
            oldest = next(iter(self._cached.values()))
            if oldest.lock.locked():  # it is in use, so it is not the oldest
                self._cached.move_to_end(oldest.head.id)
                break
            self._forget(oldest)

    def _forget(self, trace: Trace) -> None:
        if self._cached.pop(trace.head.id, None) and trace.conversations is not None:
            self._cached_bytes -= trace.conversations.size
        trace.conversations = None


def _append(file: Path, lines: bytes, *, at: int) -> None:
    """Write behind the first `at` bytes, and sync. Others are of a write that failed."""
    with file.open("r+b" if at else "xb") as stream:
        stream.seek(at)
        stream.truncate()
        stream.write(lines)
        stream.flush()
        os.fsync(stream.fileno())
    if not at:
        fsync_path(file.parent)


def _mark_full(file: Path) -> Path:
    marked = file.rename(file.with_suffix(_FULL))
    fsync_path(file.parent)
    return marked


def _read_file(file: Path) -> tuple[Conversations, int]:
    """Return the turns, and the size without a line that was cut by a crash."""
    found = Conversations()
    content = file.read_bytes()
    size = content.rfind(b"\n") + 1
    _head, *lines = content[:size].split(b"\n")[:-1]
    for line in lines:
        found.add_turn(decode_turn(line))
    return found, size


def _full(trace: Trace) -> TraceEnded:
    return TraceEnded(
        f"a turn did not fit into the trace {trace.head.id}, because {TRACE_BYTES // 2**20} MiB is "
        "the most that a trace may have; create another one"
    )


def unknown_trace(trace_id: str) -> UnknownTrace:
    return UnknownTrace(
        f"there is no trace {trace_id[:100]!r}; it may have been deleted, or ended long ago"
    )
