"""A result that lies in a file, sent piece by piece: no more than one piece is in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

_PIECE = 64 * 2**10


class FileAnswer(Response):
    """The file is opened before anything is sent, and may lose its name from then on."""

    def __init__(
        self, file: Path, *, size: int, media_type: str, headers: Mapping[str, str] | None
    ) -> None:
        super().__init__(media_type=media_type, headers=headers)
        self.headers["Content-Length"] = str(size)
        self._file = file

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        file = await asyncio.to_thread(self._file.open, "rb")
        try:
            await send(
                {
                    "type": "http.response.start",
                    "status": self.status_code,
                    "headers": self.raw_headers,
                }
            )
            while piece := await asyncio.to_thread(file.read, _PIECE):
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await asyncio.to_thread(file.close)
