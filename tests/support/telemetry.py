"""Restores logging after `configure_logging`."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import structlog


@contextmanager
def logging_restored() -> Iterator[None]:
    root = logging.getLogger()
    before, handlers, level = structlog.get_config(), root.handlers[:], root.level
    variables = structlog.contextvars.get_contextvars()
    yield
    structlog.configure(**before)
    structlog.contextvars.clear_contextvars()
    structlog.contextvars.bind_contextvars(**variables)
    logging.captureWarnings(False)
    root.handlers[:] = handlers
    root.setLevel(level)
