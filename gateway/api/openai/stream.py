"""Server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html).

Each part is a line `data: JSON`, the last one `data: [DONE]`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.api.openai.answer import Json
from gateway.api.openai.errors import error_content
from gateway.api.openai.generation import ClientGone
from tandem.errors import InternalError, TandemError
from tandem.telemetry import get_log

Steps = AsyncGenerator[Mapping[str, str] | Sequence[Json], None]
"""First the headers, then what is there in each step."""


class EventStream(Response):
    """The answer begins with the first parts, so that what fails before is an ordinary error.
    What fails later is told in the stream, and ends it."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False
        headers: Mapping[str, str] = {}
        async with aclosing(self._steps) as steps:
            try:
                async for step in steps:
                    if isinstance(step, Mapping):
                        headers = step
                        continue
                    if not started:
                        await send(_start(headers))
                        started = True
                    await send(_body(b"".join(map(_event, step))))
                await send(_body(b"data: [DONE]\n\n"))
            except ClientGone:
                pass
            except TandemError as error:
                if not started:
                    raise
                await send(_body(_event(error_content(error))))
            except Exception as error:
                if not started:
                    raise
                get_log().exception("stream_failed", path=scope["path"])
                internal = InternalError(f"{type(error).__name__} in the gateway; see its log")
                await send(_body(_event(error_content(internal))))
        if started:
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        else:
            await Response(status_code=499)(scope, receive, send)


def _start(headers: Mapping[str, str]) -> dict[str, object]:
    sent = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
    sent |= {"x-accel-buffering": "no"} | {name.lower(): value for name, value in headers.items()}
    return {
        "type": "http.response.start",
        "status": 200,
        "headers": [(name.encode(), value.encode()) for name, value in sent.items()],
    }


def _body(content: bytes) -> dict[str, object]:
    return {"type": "http.response.body", "body": content, "more_body": True}


def _event(content: Json) -> bytes:
    return b"data: " + orjson.dumps(content) + b"\n\n"
