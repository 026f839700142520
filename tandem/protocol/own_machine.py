"""HTTP clients that never use a proxy for this machine.

A proxy of the environment cannot reach this machine's loopback, and NO_PROXY is easily forgotten.
Requests to other machines use the proxy. All HTTP clients of Tandem are made here, and all gRPC
channels in `tandem.protocol.channels`."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from urllib.request import getproxies_environment, proxy_bypass

import httpx
import psutil

from tandem.protocol.http_host import parse_address


def http_client(
    base_url: str, *, headers: Mapping[str, str] | None = None, timeout: float = 60.0
) -> httpx.Client:
    if not is_own_machine(base_url):
        return httpx.Client(base_url=base_url, headers=headers, timeout=timeout)
    # With its own transport, a client asks the environment for certificates but not for a proxy.
    # Plain HTTP needs no certificates, and reading them takes 25 ms.
    transport = httpx.HTTPTransport(verify=base_url.startswith("https:"))
    return httpx.Client(base_url=base_url, headers=headers, timeout=timeout, transport=transport)


def is_own_machine(url: str) -> bool:
    """Return whether a URL's host is this machine: loopback, its name, or one of its addresses."""
    host = httpx.URL(url).host.rstrip(".").lower()
    if host in ("localhost", socket.gethostname().lower()) or host.endswith(".localhost"):
        return True
    address = parse_address(host)
    if address is None:
        return False
    return address.is_loopback or address.is_unspecified or str(address) in _own_addresses()


def follows_proxy(url: str) -> bool:
    """Return whether other programs, such as the SDK, would use a proxy for this URL."""
    parsed = httpx.URL(url)
    proxies = getproxies_environment()
    there = parsed.scheme in proxies or "all" in proxies
    return there and not proxy_bypass(parsed.host)


@contextmanager
def without_proxies() -> Iterator[None]:
    """Hide the environment's proxies during the block, for other libraries' clients."""
    hidden = {name: os.environ[name] for name in os.environ if name.lower().endswith("_proxy")}
    for name in hidden:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(hidden)


def _own_addresses() -> set[str]:
    interfaces = psutil.net_if_addrs().values()
    return {each.address.partition("%")[0] for interface in interfaces for each in interface}
