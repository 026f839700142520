"""Certificates, and the calls that they permit."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from tandem.protocol.authority import Authority
from tandem.protocol.certificate import AGENT_NAME, GATEWAY_NAME
from tandem.protocol.channels import secure_channel, server_credentials

WORKER = "trainer-s-0123456789ab-0"


@pytest.fixture(scope="module")
def authority(tmp_path_factory) -> Authority:
    return Authority.create(tmp_path_factory.mktemp("tls") / "authority")


@asynccontextmanager
async def server_with(certificate, *, clients: bool) -> AsyncIterator[str]:
    server = grpc.aio.server()
    servicer = health.aio.HealthServicer()
    await servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_secure_port("127.0.0.1:0", server_credentials(certificate, clients=clients))
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def answers(address: str, *, authority: str, name: str, own=None) -> bool:
    async with secure_channel(
        address, authority=authority, name=name, own=own, options=[]
    ) as channel:
        try:
            await health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=20
            )
        except grpc.aio.AioRpcError as error:
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            return False
    return True


async def test_a_worker_is_known_by_its_id_wherever_it_listens(authority, tmp_path):
    other = Authority.create(tmp_path / "other")
    async with server_with(authority.issue(WORKER), clients=False) as address:
        assert await answers(address, authority=authority.pem, name=WORKER)
        assert not await answers(address, authority=authority.pem, name="trainer-s-0123456789ab-1")
        assert not await answers(address, authority=other.pem, name=WORKER)


async def test_only_the_gateway_may_call_an_agent(authority, tmp_path):
    gateway = authority.issue(GATEWAY_NAME)
    stranger = Authority.create(tmp_path / "other").issue(GATEWAY_NAME)
    async with server_with(authority.issue(AGENT_NAME), clients=True) as address:
        for own, may in (
            (gateway, True),
            (None, False),
            (authority.issue(WORKER), False),
            (authority.issue(AGENT_NAME), False),
            (stranger, False),
        ):
            found = await answers(address, authority=authority.pem, name=AGENT_NAME, own=own)
            assert found == may


async def test_nobody_serves_with_the_certificate_of_a_gateway(authority):
    async with server_with(authority.issue(GATEWAY_NAME), clients=False) as address:
        assert not await answers(address, authority=authority.pem, name=GATEWAY_NAME)
