from __future__ import annotations

import pytest

from tandem.protocol.http_host import hosts_of, may_be_site


def named(host: str) -> str:
    (name,) = hosts_of([(b"accept", b"*/*"), (b"Host", host.encode())])
    return name


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1", "127.0.0.1:8000", "[::1]", "[::1]:8000", "localhost", "LocalHost:1",
        "localhost.", "app.localhost:80", "10.0.0.7:8000", "[2001:db8::1]:80", "gateway:8000",
        "tandem-gateway.tandem.svc:8000", "tandem-gateway.tandem.svc.cluster.local",
        "[::ffff:127.0.0.1]:8000", " 127.0.0.1 ",
    ],
)  # fmt: skip
def test_addresses_and_names_without_a_domain_are_no_sites(host):
    assert not may_be_site(named(host))


@pytest.mark.parametrize(
    "host",
    [
        "evil.example", "EVIL.example:8000", "evil.example.", "127.0.0.1.evil.example",
        "localhost.evil.example", "7f000001.rebind.example", "svc.evil.example", "evilsvc.example",
        "user@127.0.0.1", "127.0.0.1/evil.example", "[evil.example]", "::1", "[::1", "a b", "",
        "127.0.0.1:8000:evil.example", "127.0.0.1:port", "127.0.0.1#evil.example",
    ],
)  # fmt: skip
def test_all_other_names_may_be_sites(host):
    assert may_be_site(named(host))


def test_a_request_without_a_host_names_none():
    assert hosts_of([(b"accept", b"*/*")]) == []
