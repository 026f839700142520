"""Two hosts on one machine: network namespaces with a cable between them. Needs root."""

from __future__ import annotations

import os
import secrets
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest


@dataclass(frozen=True)
class Host:
    """A network namespace. `address` is on the cable. Only the test uses `from_test`."""

    name: str
    address: str
    from_test: str = ""

    @property
    def prefix(self) -> list[str]:
        """The command prefix to run in it, under its own host name."""
        return [
            *("nsenter", f"--net=/run/netns/{self.name}", "unshare", "--uts", "sh", "-c"),
            *('hostname "$0" && exec "$@"', self.name),
        ]

    def unplug(self) -> None:
        _ip("-n", self.name, "link", "set", "cable", "down")


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Skips the test if namespaces cannot be made."""
    number = secrets.randbelow(2**14)  # other tests make theirs at the same time
    a, b, link = f"tandem-{number}-a", f"tandem-{number}-b", f"tandem-{number}"
    net, last = f"198.18.{number >> 6}", (number & 63) * 4
    try:
        _ip("netns", "add", a)
    except FileNotFoundError:
        pytest.skip("there is no `ip`, which makes network namespaces")
    except subprocess.CalledProcessError as error:
        if os.geteuid() == 0 and "not permitted" not in error.stderr:
            raise
        pytest.skip(f"network namespaces are not permitted here: {error.stderr.strip()}")
    try:
        _ip("netns", "add", b)
        _ip("-n", a, "link", "add", "cable", "type", "veth", "peer", "cable", "netns", b)
        _ip("-n", a, "link", "add", "test", "type", "veth", "peer", link, "netns", str(os.getpid()))
        _ip("-n", a, "address", "add", "172.30.0.1/24", "dev", "cable")
        _ip("-n", b, "address", "add", "172.30.0.2/24", "dev", "cable")
        _ip("-n", a, "address", "add", f"{net}.{last + 2}/30", "dev", "test")
        _ip("address", "add", f"{net}.{last + 1}/30", "dev", link)
        for namespace, each in ((a, "lo"), (b, "lo"), (a, "cable"), (b, "cable"), (a, "test")):
            _ip("-n", namespace, "link", "set", each, "up")
        _ip("link", "set", link, "up")
        yield Host(a, "172.30.0.1", from_test=f"{net}.{last + 2}"), Host(b, "172.30.0.2")
    finally:
        for namespace in (a, b):
            subprocess.run(["ip", "netns", "del", namespace], check=False, timeout=20)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=20)
