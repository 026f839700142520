"""The custom losses that clients have traced: kept as data, handed to trainers, never run here."""

from __future__ import annotations

import time
from collections import OrderedDict

import orjson
from sqlalchemy import delete, func, insert, select
from sqlalchemy.exc import IntegrityError

from gateway.futures.table import Future, FutureTable, Outcome, Result, Waiting
from gateway.identifiers import request_id_of
from gateway.limits.quotas import Quotas
from gateway.storage.database import Database
from gateway.storage.tables import custom_losses, sessions
from tandem.custom_loss import read_custom_loss
from tandem.errors import CustomLossInvalid, UnknownLoss

MAX_LOSSES = 256
"""Of one session."""
_REMEMBERED_BYTES = 32 * 2**20
"""Of definitions in memory, of all owners; the database has the others, too."""


class CustomLossStore:
    """By `loss_id`, which is also the id of the request that created the loss:
    `SESSION:loss:NUMBER`. A loss can be used in its session alone, and goes with it."""

    def __init__(self, *, database: Database, futures: FutureTable, limits: Quotas) -> None:
        self._database = database
        self._limits = limits
        self._futures = futures
        self._definitions: OrderedDict[str, bytes] = OrderedDict()
        self._bytes = 0

    async def create(self, *, session_id: str, number: int, definition: bytes) -> str:
        """Checks and keeps a loss; returns its id, whose future has ended already.

        The same number with the same definition gives the loss of then. Raises
        `MalformedPayload`, `CustomLossInvalid`, `LimitExceeded`.
        """
        graph = read_custom_loss(definition)
        loss_id = request_id_of(owner=f"{session_id}:loss", seq_id=number)
        kept = await self._find(loss_id)
        if kept is None:
            await self._check_count(session_id)
            await self._limits.check_custom_losses(session_id=session_id)
            row = {
                "id": loss_id,
                "session_id": session_id,
                "name": graph.name,
                "definition": definition,
                "created_at": time.time(),
            }
            try:
                await self._database.write(insert(custom_losses), row)
                kept = definition
            except IntegrityError:  # the same request came twice at once
                kept = await self._find(loss_id)
        if kept != definition:
            raise CustomLossInvalid(
                f"the session has another custom loss with the number {number}; "
                "give each its own custom_loss_seq_id"
            )
        self._remember(loss_id, definition)
        if self._futures.get(loss_id) is None:
            self._promise(loss_id)
        return loss_id

    async def definition(self, loss_id: str, *, session_id: str) -> bytes:
        """What create_custom_loss was sent. Raises `UnknownLoss`, also for another session's."""
        found = None
        if loss_id.startswith(f"{session_id}:loss:"):
            found = await self._find(loss_id)
        if found is None:
            raise UnknownLoss(
                f"there is no custom loss {loss_id[:150]!r} in session {session_id}; create it "
                "with ServiceClient.create_custom_loss of the same session"
            )
        return found

    async def recall(self, request_id: str) -> Outcome | None:
        """The answer to a create_custom_loss that memory no longer holds."""
        return _answer(request_id) if await self._find(request_id) is not None else None

    async def end_session(self, session_id: str) -> None:
        """Forgets the session's losses."""
        prefix = f"{session_id}:loss:"
        for loss_id in [each for each in self._definitions if each.startswith(prefix)]:
            self._forget(loss_id)
        await self._database.write(
            delete(custom_losses).where(custom_losses.c.session_id == session_id)
        )

    async def count(self, owner: str) -> int:
        """Those in an owner's active sessions."""
        row = await self._database.read_one(
            select(func.count().label("losses"))
            .select_from(custom_losses.join(sessions, sessions.c.id == custom_losses.c.session_id))
            .where(sessions.c.owner == owner, sessions.c.state == "active")
        )
        assert row is not None
        return int(row["losses"])

    async def _find(self, loss_id: str) -> bytes | None:
        if (known := self._definitions.get(loss_id)) is not None:
            self._definitions.move_to_end(loss_id)
            return known
        row = await self._database.read_one(
            select(custom_losses.c.definition).where(custom_losses.c.id == loss_id)
        )
        if row is None:
            return None
        found = bytes(row["definition"])
        self._remember(loss_id, found)
        return found

    def _remember(self, loss_id: str, definition: bytes) -> None:
        """The definitions that were used last."""
        self._forget(loss_id)
        self._definitions[loss_id] = definition
        self._bytes += len(definition)
        while self._bytes > _REMEMBERED_BYTES:
            self._forget(next(iter(self._definitions)))

    def _forget(self, loss_id: str) -> None:
        self._bytes -= len(self._definitions.pop(loss_id, b""))

    async def _check_count(self, session_id: str) -> None:
        row = await self._database.read_one(
            select(func.count().label("losses"))
            .select_from(custom_losses)
            .where(custom_losses.c.session_id == session_id)
        )
        if row is not None and row["losses"] >= MAX_LOSSES:
            raise CustomLossInvalid(f"the session has {MAX_LOSSES} custom losses, the most allowed")

    def _promise(self, loss_id: str) -> None:
        future = Future(
            request_id=loss_id,
            source="operation",
            kind="create_custom_loss",
            describe=lambda: Waiting("the custom loss is being stored"),
        )
        future.resolve(_answer(loss_id))
        self._futures.add(future)


def _answer(loss_id: str) -> Result:
    body = orjson.dumps({"type": "create_custom_loss", "loss_id": loss_id})
    return Result(media="json", body=body)
