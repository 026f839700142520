"""What all tests share."""

from __future__ import annotations

import sys

import structlog

# Gateways of some tests run in this process, and commands are tested by what they print: what is
# logged must go neither between their lines nor into a stream that is closed after a command.
structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.__stderr__))
