"""Registered custom losses: traced graphs, which trainers receive with the request.

The gateway only stores graphs (`tandem.custom_losses.interpreter`)."""

from __future__ import annotations

import time
from dataclasses import dataclass

import orjson
import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError

from gateway.identifiers import request_id_of
from gateway.owners.limits import Quotas
from gateway.storage.database import Database
from gateway.storage.futures.table import Result
from gateway.storage.tables import custom_losses as losses
from gateway.storage.tables import sessions
from tandem.custom_losses import read_custom_loss
from tandem.errors import CustomLossInvalid, UnknownLoss

LOSS_NAME = "custom"
"""The `loss_fn` of a request with a registered loss."""
MAX_LOSSES = 256


@dataclass(eq=False, repr=False, kw_only=True)
class CustomLossStore:
    """The definitions in the database, by loss id: `SESSION:loss:NUMBER`, which is also the
    creating request's id. A loss is usable in its own session only, and ends with it."""

    database: Database
    limits: Quotas

    async def create(self, *, session_id: str, owner: str, number: int, definition: bytes) -> str:
        """Check and store a definition, and return its loss id.

        Idempotent: a repeated number with an equal definition returns the first id. Raises
        `MalformedPayload`, `CustomLossInvalid` or `LimitExceeded`."""
        graph = read_custom_loss(definition)
        loss_id = request_id_of(owner=f"{session_id}:loss", seq_id=number)
        stored = await self._find(loss_id)
        if stored is None:
            await self._check_limits(session_id, owner=owner)
            row = {
                "id": loss_id,
                "session_id": session_id,
                "name": graph.name,
                "definition": definition,
                "created_at": time.time(),
            }
            try:
                await self.database.write(sa.insert(losses), row)
                return loss_id
            except IntegrityError:  # two equal requests at once
                stored = await self._find(loss_id)
        if stored != definition:
            raise CustomLossInvalid(
                f"the session has another custom loss with the number {number}; "
                "give each its own custom_loss_seq_id"
            )
        return loss_id

    async def definition(self, loss_id: str, *, session_id: str) -> bytes:
        """Return the body of create_custom_loss. Raises `UnknownLoss`, also for another session's
        loss."""
        found = await self._find(loss_id) if loss_id.startswith(f"{session_id}:loss:") else None
        if found is None:
            raise UnknownLoss(
                f"there is no custom loss {loss_id[:150]!r} in session {session_id}; create it "
                "with ServiceClient.create_custom_loss of the same session"
            )
        return found

    async def recall(self, request_id: str) -> Result | None:
        if await self._find(request_id) is None:
            return None
        body = orjson.dumps({"type": "create_custom_loss", "loss_id": request_id})
        return Result(media="json", body=body)

    def end_session(self, session_id: str) -> None:
        self.database.write_soon(sa.delete(losses).where(losses.c.session_id == session_id))

    async def _find(self, loss_id: str) -> bytes | None:
        row = await self.database.read_one(
            sa.select(losses.c.definition).where(losses.c.id == loss_id)
        )
        return None if row is None else bytes(row["definition"])

    async def _check_limits(self, session_id: str, *, owner: str) -> None:
        of_session = sa.func.count().filter(losses.c.session_id == session_id)
        row = await self.database.read_one(
            sa.select(sa.func.count().label("of_owner"), of_session.label("of_session"))
            .select_from(losses.join(sessions, sessions.c.id == losses.c.session_id))
            .where(sessions.c.owner == owner, sessions.c.state == "active")
        )
        assert row is not None
        if row["of_session"] >= MAX_LOSSES:
            raise CustomLossInvalid(
                f"the session has {MAX_LOSSES} custom losses, the most allowed; use one of them, "
                "or make a new ServiceClient"
            )
        self.limits.check("custom_losses", owner=owner, used=row["of_owner"])
