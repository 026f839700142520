"""Structured logs and metrics for gateway, trainer and sampler.

A log line is one JSON object: `{"event": "published", "level": "info", "timestamp": …, "service":
"trainer", "session_id": …, "run_id": …, "request_id": …, …}`. Metrics have the prefix `tandem_`,
base units, and labels with few values."""

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
    """Replace text that looks like a key or token, because people put them into paths and names."""
    return _CREDENTIAL.sub("(credential)", text)


def _dumps(value: object, **_: object) -> str:
    return without_credentials(orjson.dumps(value, default=str).decode())


def append_line(fd: int, line: bytes, *, known_end: int = -1) -> int:
    """Append a line, with its newline, to an open file with several writers.

    It starts a new line, even after one that a full disk or a killed writer cut. Returns the size
    of the file after the line, or -1 if a part was written. A file of the size `known_end` is known
    to end with a line. Raises `OSError`, after which a part may be written."""
    about = os.fstat(fd)
    size = about.st_size if stat.S_ISREG(about.st_mode) else 0
    if size not in (0, known_end) and _ends_within_a_line(fd, size):
        line = b"\n" + line
    return size + len(line) if os.write(fd, line) == len(line) else -1


def _ends_within_a_line(fd: int, size: int) -> bool:
    with suppress(OSError):  # not Linux, or not allowed
        # The descriptor is write-only, and the file may have lost its name.
        reader = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
        try:
            return os.pread(reader, 1, size - 1) not in (b"\n", b"")
        finally:
            os.close(reader)
    return False


class _LossyStream:
    """Drops output that cannot be written: a full disk costs log lines, not operations."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._end = -1  # spares most lines three system calls
        self._fd: int | None = None
        with suppress(OSError, AttributeError):  # an in-memory stream
            self._fd = stream.fileno()

    def write(self, text: str) -> int:
        with suppress(OSError):  # no place left to report it
            if self._fd is not None:
                # Not through the stream: its buffer would keep the rest of a line.
                line = text.encode(errors="backslashreplace")
                self._end = append_line(self._fd, line, known_end=self._end)
            else:
                self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()


def configure_logging(*, service: str, level: str = "info", stream: TextIO | None = None) -> None:
    """Send our logs, and libraries' warnings and errors, to `stream` as JSON lines.

    In a container, lines name the image's version: workers may run another image than the gateway.
    """
    stream = cast(TextIO, _LossyStream(stream if stream is not None else sys.stderr))
    number = logging.getLevelNamesMapping()[level.upper()]
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    as_json: list[structlog.typing.Processor] = [
        structlog.processors.format_exc_info,
        structlog.processors.JSONRenderer(serializer=_dumps),
    ]
    structlog.configure(
        processors=[*shared, *as_json],
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
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *as_json],
        )
    )
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.captureWarnings(True)


def get_log(**bound: object) -> Log:
    """Return a logger with the given ids in its lines."""
    return cast(Log, structlog.get_logger(**bound))


@contextmanager
def log_context(**values: object) -> Iterator[None]:
    """Add ids to every log line of the block."""
    with structlog.contextvars.bound_contextvars(**values):
        yield
