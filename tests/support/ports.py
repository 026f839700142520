"""Ports for tests that must know one before something listens there, or that need one twice."""

from __future__ import annotations

import random
import socket
from pathlib import Path

_FIRST = 20_000
_ANY = random.SystemRandom()


def known_port() -> int:
    """Return a port of 127.0.0.1 that is free, and that the kernel gives to nobody who asks for any
    port: between two uses, one of those would become the port of a server of another test."""
    given = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii")
    while True:
        port = _ANY.randrange(_FIRST, int(given.split()[0]))
        with socket.socket() as found:
            try:
                found.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
