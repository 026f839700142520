"""The operation log: what was accepted, in the order of each run, and what came of it.

An operation is in the log before its client hears its request_id: the payload as a file, the
rest as a row. The payload goes when the operation has ended; the result stays until it was
fetched, or for `result_ttl`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from pathlib import Path

from sqlalchemy import and_, bindparam, insert, select, update

from gateway.futures.table import Outcome, Result
from gateway.identifiers import operation_blob, request_id_of, result_blob, split_request_id
from gateway.storage.database import Database
from gateway.storage.tables import operations
from tandem.errors import GatewayRestarted, StorageFull, TandemError, UnknownRequest, from_type

_INLINE_RESULT_BYTES = 64 * 1024
_MOST_OF_A_REQUEST = 32 * 1024
"""Bytes. Rows stay, and one with right fields is never as long."""

_ACCEPT = insert(operations)
_THIS = and_(
    operations.c.run_id == bindparam("this_run"), operations.c.seq_id == bindparam("this_seq")
)
_END = (
    update(operations)
    .where(_THIS)
    .values(
        state=bindparam("new_state"),
        ended_at=bindparam("new_ended_at"),
        error_type=bindparam("new_error_type"),
        error=bindparam("new_error"),
        media=bindparam("new_media"),
        result=bindparam("new_result"),
    )
)
_FORGET = update(operations).where(_THIS).values(result=None, media="")


class Journal:
    def __init__(self, *, database: Database, data_dir: Path, result_ttl: float) -> None:
        self._database = database
        self._data_dir = data_dir
        self._result_ttl = result_ttl

    async def accept(
        self,
        *,
        run_id: str,
        seq_id: int,
        kind: str,
        request: bytes,
        payload: bytes | None,
        owner: str = "",
    ) -> Path | None:
        """Returns once the operation would survive us; says where its payload lies. Owners
        take turns; what has none goes before them.

        Raises `StorageFull`, or sqlalchemy's `IntegrityError` for a place that is taken.
        """
        blob = operation_blob(self._data_dir, run_id=run_id, seq_id=seq_id)

        def write_payload() -> None:
            assert payload is not None
            blob.parent.mkdir(parents=True, exist_ok=True)
            blob.write_bytes(payload)

        row = {
            "run_id": run_id,
            "seq_id": seq_id,
            "kind": kind,
            "state": "accepted",
            "request": request if len(request) <= _MOST_OF_A_REQUEST else b"",
            "accepted_at": time.time(),
            "error_type": "",
            "error": "",
            "media": "",
        }
        before = write_payload if payload is not None else None
        try:
            await self._database.write(
                _ACCEPT, row, before=before, owner=owner, size=len(payload or b"")
            )
        except OSError as error:
            raise StorageFull(f"the payload could not be written: {error.strerror}") from error
        return blob if payload is not None else None

    def end(self, *, run_id: str, seq_id: int, outcome: Outcome, blob: Path | None) -> None:
        """Notes the outcome. The client may hear of it before it is committed: should we die
        in between, it knows more than the log, which then calls the operation failed."""
        failed = isinstance(outcome, TandemError)
        body = b"" if isinstance(outcome, TandemError) else outcome.body
        request_id = request_id_of(owner=run_id, seq_id=seq_id)
        large = len(body) > _INLINE_RESULT_BYTES

        def write_result() -> None:
            path = result_blob(self._data_dir, request_id=request_id)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(body)

        def remove_payload() -> None:
            assert blob is not None
            blob.unlink(missing_ok=True)

        self._database.write_soon(
            _END,
            {
                "this_run": run_id,
                "this_seq": seq_id,
                "new_state": "failed" if failed else "done",
                "new_ended_at": time.time(),
                "new_error_type": outcome.type if isinstance(outcome, TandemError) else "",
                "new_error": outcome.message if isinstance(outcome, TandemError) else "",
                "new_media": "" if isinstance(outcome, TandemError) else outcome.media,
                "new_result": None if failed or large else body,
            },
            before=write_result if large else None,
            after=remove_payload if blob is not None else None,
        )

    async def recall(self, request_id: str) -> Outcome | None:
        """The outcome of an operation that memory no longer holds.

        None where the log has no such operation; an `UnknownRequest` where its result is over.
        """
        named = split_request_id(request_id)
        if named is None:
            return None
        run_id, seq_id = named
        await self._database.flush()
        row = await self._database.read_one(
            select(operations).where(operations.c.run_id == run_id, operations.c.seq_id == seq_id)
        )
        if row is None:
            return None
        if row["state"] == "failed":
            return from_type(row["error_type"], row["error"])
        if row["state"] == "accepted":
            return GatewayRestarted("the gateway lost this operation when it restarted")
        if row["result"] is not None:
            return Result(media=row["media"], body=row["result"])
        file = result_blob(self._data_dir, request_id=request_id)
        try:
            size = (await asyncio.to_thread(file.stat)).st_size
        except OSError:
            return UnknownRequest(f"the result of {request_id} was fetched or has expired")
        return Result(media=row["media"], file=file, file_bytes=size)

    def forget(self, request_ids: Iterable[str]) -> None:
        """Gives up the results of operations that were fetched."""
        rows, files = [], []
        for request_id in request_ids:
            if (named := split_request_id(request_id)) is not None:
                rows.append({"this_run": named[0], "this_seq": named[1]})
                files.append(result_blob(self._data_dir, request_id=request_id))
        if rows:
            self._database.write_soon(_FORGET, *rows, after=lambda: _unlink(files))

    def expire(self) -> None:
        """Gives up the results that nobody fetched within `result_ttl`."""
        cutoff = time.time() - self._result_ttl
        self._database.write_soon(
            update(operations)
            .where(operations.c.ended_at < cutoff, operations.c.result.is_not(None))
            .values(result=None),
            after=lambda: _unlink(_older_than(self._data_dir / "results", cutoff)),
        )

    async def abandon(self) -> int:
        """Fails what an earlier gateway left unfinished; returns how many there were."""
        open_rows = await self._database.read(
            select(operations.c.run_id).where(operations.c.state == "accepted")
        )
        if open_rows:
            await self._database.write(
                update(operations)
                .where(operations.c.state == "accepted")
                .values(
                    state="failed",
                    ended_at=time.time(),
                    error_type=GatewayRestarted.type,
                    error="the gateway restarted before this operation had ended; create the "
                    "run again, from a checkpoint if there is one",
                )
            )
        _unlink(_older_than(self._data_dir / "operations", time.time()))
        return len(open_rows)


def _older_than(folder: Path, cutoff: float) -> list[Path]:
    if not folder.is_dir():
        return []
    files = [path for path in folder.rglob("*") if path.is_file()]
    return [path for path in files if path.stat().st_mtime < cutoff]


def _unlink(paths: Iterable[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)
