"""The Host header of a request: the server's name as its client knows it.

A web page can point its site's name to this machine after it was loaded (DNS rebinding). The
browser then lets it read answers from a local server, with the site's name as Host. So a server for
this machine refuses the Host of a possible site."""

from __future__ import annotations

import re
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv6Address, ip_address

_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\s:/@?#\[\]]+))(?::[0-9]{0,5})?")
_NO_SITES = (".localhost", ".svc", ".svc.cluster.local")


def hosts_of(headers: Iterable[tuple[bytes, bytes]]) -> list[str]:
    """Return the hosts of the Host headers, in lower case, without ports and final dots.

    An invalid header gives ""."""
    found = (value.decode("latin-1").strip() for name, value in headers if name.lower() == b"host")
    return [_name(each) for each in found]


def _name(host: str) -> str:
    parts = _HOST.fullmatch(host)
    return "" if parts is None else (parts[1] or parts[2]).removesuffix(".").lower()


def may_be_site(name: str) -> bool:
    """Return whether a host may be a site of the internet.

    Addresses, names without a dot, `x.localhost` and cluster services are none."""
    if not name:
        return True
    return "." in name and not name.endswith(_NO_SITES) and parse_address(name) is None


def is_loopback(host: str) -> bool:
    """Return whether a name or address means only this machine."""
    address = parse_address(host)
    return host == "localhost" if address is None else address.is_loopback


def parse_address(name: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(name)
    except ValueError:
        return None
