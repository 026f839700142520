"""Ports that a test must know before a server listens, or must use twice."""

from __future__ import annotations

import random
import socket
from pathlib import Path

_FIRST = 20_000
_ANY = random.SystemRandom()


def known_port() -> int:
    """Return a free port of 127.0.0.1 outside the range of automatic ports.

    Another test's server could get an automatic port between two uses."""
    given = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii")
    while True:
        port = _ANY.randrange(_FIRST, int(given.split()[0]))
        with socket.socket() as found:
            try:
                found.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
