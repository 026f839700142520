"""The Host of a request: the name by which its client reached the server.

A page of another site can let its name lead to this machine after it was loaded (DNS rebinding).
The browser then lets the page read what a server here answers, and sends the site's name as Host.
So a server that is for this machine alone refuses requests whose Host may be a site.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv6Address, ip_address

_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\s:/@?#\[\]]+))(?::[0-9]{0,5})?")
_NO_SITES = (".localhost", ".svc", ".svc.cluster.local")


def hosts_of(headers: Iterable[tuple[bytes, bytes]]) -> list[str]:
    """Return what the Host headers of a request name, in small letters, without ports and final
    dots; "" for a header that names nothing. A request of HTTP/1.0 may have none."""
    found = (value.decode("latin-1").strip() for name, value in headers if name.lower() == b"host")
    return [_name(each) for each in found]


def _name(host: str) -> str:
    parts = _HOST.fullmatch(host)
    return "" if parts is None else (parts[1] or parts[2]).removesuffix(".").lower()


def may_be_site(name: str) -> bool:
    """Whether a host may be a site of the internet. An address is none, nor is a name without a
    dot, of this machine (`x.localhost`), or of a cluster's service."""
    if not name:
        return True
    return "." in name and not name.endswith(_NO_SITES) and _address(name) is None


def is_loopback(host: str) -> bool:
    """Whether a name or an address is this machine alone."""
    address = _address(host)
    return host == "localhost" if address is None else address.is_loopback


def _address(name: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(name)
    except ValueError:
        return None
