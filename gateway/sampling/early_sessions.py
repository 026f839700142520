"""Sampling sessions without a row, because their weights are not durable yet.

Their clients sample already. If the files are lost, the session has a reason instead. After a
change of gateways, requests wait until the operation that opens the session again has ended."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from gateway.identifiers import sampling_session_id_of
from tandem.errors import Overloaded, describe

_PATIENCE = 20.0
"""Seconds of a request that waits for a sampling session. Its client asks again."""


@dataclass(frozen=True)
class _Early:
    version: str
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class EarlySessions:
    """By the ids of sampling sessions."""

    def __init__(self) -> None:
        self._open: dict[str, _Early] = {}
        self._awaited: dict[str, asyncio.Future[None]] = {}
        """The ends of the operations that open sessions again."""
        self._lost: dict[str, str] = {}

    def knows(self, id: str) -> bool:
        return id in self._awaited or id in self._lost

    def why_lost(self, id: str) -> str | None:
        return self._lost.get(id)

    def note_opened(self, id: str, version: str) -> None:
        """`note_recorded` or `note_lost` must follow."""
        self._lost.pop(id, None)
        self._open[id] = _Early(version)

    def is_open(self, id: str, version: str) -> bool:
        """Return whether a session is open for this version."""
        return id in self._open and self._open[id].version == version

    def note_recorded(self, id: str) -> None:
        """Note that a session has its row, or that its client has ended it."""
        self._open.pop(id).ended.set()

    def note_lost(self, id: str, error: BaseException) -> None:
        """Note why a session's weights are not durable."""
        self.note_recorded(id)
        cancelled = isinstance(error, asyncio.CancelledError)
        self._lost[id] = "its run has ended" if cancelled else describe(error)

    def forget_reasons(self, session_id: str) -> None:
        """Forget the reasons of an ended session."""
        prefix = sampling_session_id_of(session_id=session_id, number=0)[:-1]
        self._lost = {id: why for id, why in self._lost.items() if not id.startswith(prefix)}

    def expect(self, id: str, end: asyncio.Future[None]) -> None:
        """Let requests wait for a session that an earlier gateway's client may have."""
        self._awaited[id] = end
        end.add_done_callback(lambda _: self._awaited.pop(id, None))

    async def until_opened(self, id: str) -> None:
        """Wait for an expected session. Raises `Overloaded`."""
        if (end := self._awaited.get(id)) is not None:
            await asyncio.wait({end}, timeout=_PATIENCE)
            if not end.done() and id not in self._open:
                raise Overloaded("the run continues in another gateway; ask again")

    async def until_recorded(self, id: str) -> None:
        """Wait for a session's row. Raises `Overloaded`."""
        if (early := self._open.get(id)) is not None:
            try:
                await asyncio.wait_for(early.ended.wait(), _PATIENCE)
            except TimeoutError:
                raise Overloaded("the disk is taking the new weights; ask again") from None
