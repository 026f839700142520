from __future__ import annotations

import os
import re
import socket
from pathlib import Path

import psutil
import pytest

from tandem.protocol.own_machine import follows_proxy, http_client, is_own_machine, without_proxies

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "127.8.9.10", "localhost", "LOCALHOST.", "a.localhost", "[::1]", "0.0.0.0"],
)
def test_a_loopback_address_is_this_machine(host):
    assert is_own_machine(f"http://{host}:8000/api/v1")


def test_the_name_and_the_addresses_of_this_machine_are_this_machine():
    assert is_own_machine(f"https://{socket.gethostname()}")
    for interface in psutil.net_if_addrs().values():
        for each in interface:
            if each.family == socket.AF_INET:
                assert is_own_machine(f"http://{each.address}:1")


@pytest.mark.parametrize(
    "host", ["gateway.example", "localhost.example", "192.0.2.7", "[2001:db8::1]"]
)
def test_other_addresses_are_other_machines(host):
    assert not is_own_machine(f"http://{host}:8000")


def test_a_client_of_another_machine_follows_the_proxy(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    mounted = [http_client(f"http://{host}:1")._mounts for host in ("gateway.example", "127.0.0.1")]
    assert [bool(each) for each in mounted] == [True, False]


@pytest.mark.parametrize("name", ["http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"])
def test_a_proxy_of_the_environment_is_seen_unless_no_proxy_names_the_host(monkeypatch, name):
    assert not follows_proxy("http://127.0.0.1:8000")
    monkeypatch.setenv(name, "http://proxy.example:3128")
    assert follows_proxy("http://127.0.0.1:8000")
    with without_proxies():
        assert name not in os.environ
    assert os.environ[name] == "http://proxy.example:3128"
    monkeypatch.setenv("NO_PROXY", "localhost,127.0.0.1")
    assert not follows_proxy("http://127.0.0.1:8000")


def test_clients_are_made_in_one_place_each():
    """So none of them forgets that requests to this machine take no proxy."""
    makes = {
        r"httpx\.(Client|AsyncClient|get|post|put|delete|request|stream)\(|urlopen\(|"
        r"HTTPS?Connection\(|(?<![\w.])requests\.(get|post|Session)\(": {
            "tandem/protocol/own_machine.py"
        },
        # The agent's check imports little, and calls a Unix socket.
        r"\b(in)?secure_channel\(": {
            "tandem/protocol/channels.py",
            "tandem/agent/check.py",
            "gateway/workers/launchers/agent.py",
        },
        r"grpc\.(aio\.)?(in)?secure_channel\(": {
            "tandem/protocol/channels.py",
            "tandem/agent/check.py",
        },
        # Kubernetes' client library makes its session, for a remote cluster.
        r"aiohttp\.ClientSession\(": set(),
    }
    folders = ("tandem", "gateway", "trainer_service", "sampler_service", "benchmarks", "scripts")
    texts = {
        str(path.relative_to(ROOT)): path.read_text()
        for folder in folders
        for path in (ROOT / folder).rglob("*.py")
    }
    for pattern, allowed in makes.items():
        found = {name for name, text in texts.items() if re.search(pattern, text)}
        assert found == allowed, pattern
