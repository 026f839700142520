"""Structured logs and metrics, alike in the gateway, the trainer and the sampler.

A log line is one JSON object: `{"event": "published", "level": "info", "timestamp": …,
"service": "trainer", "session_id": …, "run_id": …, "request_id": …, …}`. Metrics carry the
prefix `tandem_`, base units and no label whose values are unbounded.
"""

from __future__ import annotations

import logging
import os
import re
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO, cast

import orjson
import structlog

Log = structlog.stdlib.BoundLogger


_CREDENTIAL = re.compile(
    r"tml-[A-Za-z0-9_-]{16,}|eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+"
)


def without_credentials(text: str) -> str:
    """Return the text without what looks like a key or a token.

    People put them into the wrong places, such as a path, from where they must not reach logs.
    """
    return _CREDENTIAL.sub("(credential)", text)


def _dumps(value: object, **_: object) -> str:
    return without_credentials(orjson.dumps(value, default=str).decode())


def append_line(fd: int, line: bytes) -> None:
    """Append a line, which ends with a newline, to an open file that other processes append to as
    well. It begins on a line of its own: also after a line that a full disk or a killed writer has
    cut. Raises `OSError`, after which a part of it may be there."""
    os.write(fd, b"\n" + line if _ends_within_a_line(fd) else line)


def _ends_within_a_line(fd: int) -> bool:
    about = os.fstat(fd)
    if not stat.S_ISREG(about.st_mode) or not about.st_size:
        return False
    with suppress(OSError):  # not Linux, or not allowed
        # The descriptor is one to write, and the file may have no name any more.
        reader = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
        try:
            return os.pread(reader, 1, about.st_size - 1) not in (b"\n", b"")
        finally:
            os.close(reader)
    return False


class _LossyStream:
    """Drops what cannot be written: a full disk costs log lines, not operations."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._fd: int | None = None
        with suppress(OSError, AttributeError):  # in memory, or another object that writes
            self._fd = stream.fileno()

    def write(self, text: str) -> int:
        with suppress(OSError):  # there is nowhere left to report it
            if self._fd is not None:
                # Not through the stream: its buffer would keep the rest of a line for later.
                append_line(self._fd, text.encode(errors="backslashreplace"))
            else:
                self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()


def configure_logging(*, service: str, level: str = "info", stream: TextIO | None = None) -> None:
    """Send our logs, and the warnings and errors of libraries, to `stream` as JSON lines; in a
    container with the version of its image, since workers may have another one than the gateway."""
    stream = cast(TextIO, _LossyStream(stream if stream is not None else sys.stderr))
    number = logging.getLevelNamesMapping()[level.upper()]
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    structlog.configure(
        processors=[
            *shared,
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(serializer=_dumps),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.WriteLoggerFactory(file=stream),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(service=service)
    if image := os.environ.get("TANDEM_IMAGE_VERSION"):
        structlog.contextvars.bind_contextvars(image=image)
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.format_exc_info,
                structlog.processors.JSONRenderer(serializer=_dumps),
            ],
        )
    )
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.captureWarnings(True)


def get_log(**bound: object) -> Log:
    """Return a logger whose lines carry the given ids."""
    return cast(Log, structlog.get_logger(**bound))


@contextmanager
def log_context(**values: object) -> Iterator[None]:
    """Add ids to every log line written inside."""
    with structlog.contextvars.bound_contextvars(**values):
        yield
