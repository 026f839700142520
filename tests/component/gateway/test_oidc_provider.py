"""The client of a provider of OpenID Connect: faulty answers, repeated tries and many at once."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

import pytest
from joserfc import jwt

from gateway.owners.auth import oidc
from gateway.owners.auth.oidc import OidcProvider, SignInFlow
from tandem.errors import InvalidRequest, SignInFailed
from tandem.settings.oidc import OidcSettings
from tests.support.oidc import Provider, query_of, running_provider

pytestmark = pytest.mark.filterwarnings(
    "ignore:get_jwt_config:DeprecationWarning"
)  # the provider's

BACK = "http://localhost/sign-in/oidc/callback"
DISCOVERY = "/.well-known/openid-configuration"


@pytest.fixture
def provider():
    with running_provider() as provider:
        provider.know("ann-1", email="ann@example.com", email_verified=True)
        yield provider


@pytest.fixture
def client(provider, tmp_path):
    (secret := tmp_path / "secret").write_text("client-secret-of-a-test")
    rules = {"@example.com": {"role": "member"}}
    return OidcProvider(
        OidcSettings(
            issuer=provider.url, client_id="tandem", client_secret_file=secret, rules=rules
        )
    )


def new_flow() -> SignInFlow:
    return SignInFlow.start_flow(b"k" * 32, "browser", next="/", now=time.time())


async def approved(client: OidcProvider, provider: Provider) -> tuple[SignInFlow, str]:
    """Return a flow and its code."""
    flow = new_flow()
    address = await client.address_of(flow, redirect_uri=BACK)
    back = await asyncio.to_thread(provider.approve, address, "ann-1")
    return flow, query_of(back)["code"]


async def outcome(client: OidcProvider, flow: SignInFlow, code: str) -> object:
    try:
        return await client.claims_of(flow, code=code, redirect_uri=BACK)
    except (InvalidRequest, SignInFailed) as error:
        return error


@pytest.mark.parametrize(
    "token",
    [
        {"expires_in": [1]},
        {"expires_in": "soon"},
        {"expires_in": -100},
        {"token_type": "mac"},
        {"token_type": None},
        {"token_type": 7},
        {"access_token": None},
        {"access_token": []},
        {"access_token": 7},
        {"access_token": ["x"]},
    ],
)
async def test_a_faulty_answer_to_a_code_is_the_providers_failure(client, provider, token):
    """The ID token has no address, so the access token is used as well."""
    provider.forge = lambda claims, key: jwt.encode(
        {"alg": "RS256"}, {n: c for n, c in claims.items() if n not in ("email", "at_hash")}, key
    )
    flow, code = await approved(client, provider)
    provider.token = token
    failure = await outcome(client, flow, code)
    assert isinstance(failure, SignInFailed), failure
    assert "localhost does not answer properly now" in failure.message


async def test_a_state_has_one_try_also_for_two_answers_at_once(client, provider):
    flow, code = await approved(client, provider)
    found = await asyncio.gather(*(outcome(client, flow, each) for each in ("wrong", code)))
    assert "has refused the sign-in" in found[0].message
    again = await outcome(client, flow, code)
    assert {"used before" in each.message for each in (found[1], again)} == {True}
    assert len(provider.forms) == 1


async def test_the_newest_states_are_remembered(client, provider, monkeypatch):
    assert client._used.maxlen == oidc._MOST_USED
    used = [await approved(client, provider) for _ in range(2)]
    for flow, code in used:
        assert (await outcome(client, flow, code))["sub"] == "ann-1"
    client._used.extend(str(number) for number in range(oidc._MOST_USED - 1))
    assert "invalid_grant" in (await outcome(client, *used[0])).message, "the provider refuses it"
    assert len(client._used) == oidc._MOST_USED


async def test_many_who_begin_at_once_cause_one_request(client, provider):
    found = [client.address_of(new_flow(), redirect_uri=BACK) for _ in range(5)]
    assert len(set(await asyncio.gather(*found))) == 5
    assert provider.paths.count(DISCOVERY) == 1


async def test_a_failed_discovery_is_repeated_after_some_seconds(client, provider):
    now = time.time()
    client._clock = lambda: now
    provider.discovery = {"issuer": "http://localhost:1"}
    for _ in range(3):
        with pytest.raises(SignInFailed, match="its issuer is"):
            await client.address_of(new_flow(), redirect_uri=BACK)
    assert provider.paths.count(DISCOVERY) == 1
    provider.discovery = {}
    now += oidc._RETRY_AFTER
    assert await client.address_of(new_flow(), redirect_uri=BACK)
    assert provider.paths.count(DISCOVERY) == 2


@dataclass
class SlowTokens:
    """A server that answers nobody until `open`. `most` connections were open at once."""

    here: int = 0
    most: int = 0
    answered: int = 0
    come: asyncio.Event = field(default_factory=asyncio.Event)
    open: asyncio.Event = field(default_factory=asyncio.Event)

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.here += 1
        self.most = max(self.most, self.here)
        if self.here == oidc._MOST_EXCHANGES:
            self.come.set()
        await reader.readuntil(b"\r\n\r\n")
        await self.open.wait()
        self.here -= 1
        self.answered += 1
        writer.write(b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        await writer.drain()
        writer.close()


async def test_some_exchanges_run_at_once_and_others_wait(client, provider):
    tokens, many = SlowTokens(), 3 * oidc._MOST_EXCHANGES
    server = await asyncio.start_server(tokens.answer, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        provider.discovery = {"token_endpoint": f"http://127.0.0.1:{port}/token"}
        tries = [asyncio.create_task(outcome(client, new_flow(), "x")) for _ in range(many)]
        await asyncio.wait_for(tokens.come.wait(), 30)
        tokens.open.set()
        found = await asyncio.gather(*tries)
    assert {type(each) for each in found} == {SignInFailed}
    assert (tokens.most, tokens.answered) == (oidc._MOST_EXCHANGES, many)
