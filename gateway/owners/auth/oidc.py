"""A client of one OpenID Connect provider: the code flow with PKCE, by Authlib.

Nothing is stored for an unfinished sign-in. The browser's cookie holds a secret, and `state` a
random number and the page to return to, signed together. The nonce and the PKCE verifier follow
from them. So several tabs can sign in at once, and strangers fill no table."""

from __future__ import annotations

import asyncio
import secrets
import ssl
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import urlsplit

import httpx2
from authlib.common.errors import AuthlibBaseError
from authlib.integrations.httpx_client import AsyncOAuth2Client
from authlib.oidc.core import CodeIDToken
from joserfc import jwt
from joserfc.errors import InvalidKeyIdError, JoseError
from joserfc.jwk import KeySet
from joserfc.jws import JWSRegistry
from pydantic import BaseModel

from gateway.owners.auth.signing import is_signed, sign
from tandem.errors import InvalidRequest, PermissionDenied, SignInFailed, describe
from tandem.protocol.http_host import is_loopback
from tandem.settings.oidc import OidcSettings

FLOW_SECONDS = 600
_DEADLINE = 10.0
"""Seconds for all requests of one step to the provider."""
_KEPT = 3600.0
"""Seconds for which discovery and keys are kept."""
_RETRY_AFTER = 5.0
"""Seconds until a failed discovery is repeated."""
_MOST_EXCHANGES = 8
"""Codes that are exchanged at once. Others wait until their deadline."""
_MOST_USED = 4096
"""Remembered states. The provider refuses the code of a forgotten one."""
_LONGEST_NEXT = 300
_ALGORITHMS = [
    *(f"{kind}{bits}" for kind in ("RS", "PS", "ES") for bits in (256, 384, 512)),
    "EdDSA",
    "Ed25519",
]
"""Asymmetric ones only: with HS256, the public key or the client secret could sign."""
_FAILURES = (
    *(httpx2.HTTPError, httpx2.InvalidURL, AuthlibBaseError, JoseError, OSError, ValueError),
    *(AttributeError, LookupError, TypeError),  # Authlib does not check the types in an answer
)
_LEEWAY = 60
_SCOPE = "openid email profile"


@dataclass(frozen=True)
class SignInFlow:
    """One unfinished sign-in. `next` is the path to go to afterwards."""

    state: str
    nonce: str
    verifier: str
    next: str

    @classmethod
    def start_flow(cls, key: bytes, secret: str, *, next: str, now: float) -> Self:
        """`key` signs, and `secret` is the browser's."""
        kept = next if len(next) <= _LONGEST_NEXT else "/"
        stated = f"{int(now) + FLOW_SECONDS}.{secrets.token_hex(16)}.{kept.encode().hex()}"
        return cls._of(key, secret, stated)

    @classmethod
    def resume_flow(cls, key: bytes, secret: str, *, state: str, now: float) -> Self:
        """Raise `InvalidRequest` for an old state, or one of another browser or gateway."""
        stated, _, signature = state.rpartition(".")
        if not secret or not is_signed(key, signature, "oidc-state", secret, stated):
            raise InvalidRequest("this sign-in was not begun in this browser; begin it again")
        if int(stated.partition(".")[0]) <= now:
            raise InvalidRequest("this sign-in has taken too long; begin it again")
        return cls._of(key, secret, stated)

    @classmethod
    def _of(cls, key: bytes, secret: str, stated: str) -> Self:
        return cls(
            state=f"{stated}.{sign(key, 'oidc-state', secret, stated)}",
            nonce=sign(key, "oidc-nonce", secret, stated),
            verifier=sign(key, "oidc-verifier", secret, stated),
            next=bytes.fromhex(stated.rpartition(".")[2]).decode(),
        )


class ProviderMetadata(BaseModel):
    """The part of the discovery document that is used."""

    issuer: str
    authorization_endpoint: str
    token_endpoint: str
    jwks_uri: str
    userinfo_endpoint: str | None = None


class OidcProvider:
    """Raises `InvalidRequest` for settings that cannot work."""

    def __init__(self, settings: OidcSettings, *, clock: Callable[[], float] = time.time) -> None:
        self.settings = settings
        self._clock = clock
        self.host = urlsplit(settings.issuer).hostname or ""
        if not _is_safe(settings.issuer):
            raise InvalidRequest(
                "the issuer of TANDEM_OIDC must begin with https://, except for one on this machine"
            )
        self._secret = None
        if (path := settings.client_secret_file) is not None:
            try:
                self._secret = path.read_text(encoding="utf-8").strip()
            except (OSError, UnicodeDecodeError) as error:
                raise InvalidRequest(
                    f"the client_secret_file of TANDEM_OIDC ({path}) cannot be read: "
                    f"{describe(error)}"
                ) from error
            if not self._secret:
                raise InvalidRequest(
                    f"the client_secret_file of TANDEM_OIDC ({path}) is empty; write the client's "
                    "secret to it, or leave client_secret_file out for a public client"
                )
        self._tls = ssl.create_default_context()
        self._discovered: tuple[float, ProviderMetadata | str] = (0.0, "")
        """The end of its validity, and the metadata or the message of a failure."""
        self._discovering = asyncio.Lock()
        self._keys: tuple[float, KeySet] | None = None
        self._exchanges = asyncio.Semaphore(_MOST_EXCHANGES)
        self._used = deque[str](maxlen=_MOST_USED)

    async def address_of(self, flow: SignInFlow, *, redirect_uri: str) -> str:
        """Return the address that asks the person. Raises `SignInFailed`."""
        metadata = await self._discover()
        async with self._client() as client:
            address, _ = client.create_authorization_url(
                metadata.authorization_endpoint,
                state=flow.state,
                nonce=flow.nonce,
                code_verifier=flow.verifier,
                redirect_uri=redirect_uri,
            )
        return str(address)

    async def claims_of(
        self, flow: SignInFlow, *, code: str, redirect_uri: str
    ) -> Mapping[str, Any]:
        """Exchange the code, with one try for a flow, and return the verified claims of the person.
        Raises `SignInFailed`, `PermissionDenied` for a wrong ID token, or `InvalidRequest`."""
        metadata = await self._discover()
        async with self._client() as client, self._exchanges:
            if flow.state in self._used:
                raise InvalidRequest("this sign-in was used before; begin it again")
            self._used.append(flow.state)
            try:
                token = await client.fetch_token(
                    metadata.token_endpoint,
                    grant_type="authorization_code",
                    code=code,
                    code_verifier=flow.verifier,
                    redirect_uri=redirect_uri,
                )
            except AuthlibBaseError as error:
                raise InvalidRequest(
                    f"the provider {self.host} has refused the sign-in ({str(error.error)[:80]}); "
                    "begin it again, and tell an admin of this gateway if that does not help"
                ) from error
            claims = await self._verified(client, token, nonce=flow.nonce)
            if "email" not in claims and metadata.userinfo_endpoint:
                more = await _fetch(client, metadata.userinfo_endpoint, withhold_token=False)
                if more.get("sub") != claims["sub"]:
                    raise PermissionDenied(
                        f"the provider {self.host} has answered about another person"
                    )
                claims = {**more, **claims}
        return claims

    async def _verified(
        self, client: AsyncOAuth2Client, token: Mapping[str, Any], *, nonce: str
    ) -> dict[str, Any]:
        """Check signature, issuer, audience, times, nonce and the access token's hash."""
        registry = JWSRegistry(algorithms=_ALGORITHMS, strict_check_header=False)
        try:
            text = str(token.get("id_token"))
            try:
                found = jwt.decode(text, await self._key_set(client), registry=registry)
            except InvalidKeyIdError:  # the provider has a new key
                self._keys = None
                found = jwt.decode(text, await self._key_set(client), registry=registry)
            options = {
                "iss": {"essential": True, "value": self.settings.issuer},
                "aud": {"essential": True, "value": self.settings.client_id},
                "sub": {"essential": True},
            }
            facts = {"nonce": nonce, "client_id": self.settings.client_id}
            facts["access_token"] = token.get("access_token", "")
            claims = CodeIDToken(found.claims, found.header, options, facts)
            claims.validate(int(self._clock()), _LEEWAY)
        except (JoseError, ValueError) as error:
            raise PermissionDenied(
                f"the ID token of {self.host} was refused ({describe(error)}); sign in again, and "
                "tell an admin of this gateway if that does not help"
            ) from error
        return dict(claims)

    @asynccontextmanager
    async def _client(self) -> AsyncIterator[AsyncOAuth2Client]:
        """Yield a client whose requests end by the deadline. Raises `SignInFailed`."""
        client = AsyncOAuth2Client(
            self.settings.client_id,
            self._secret,
            scope=_SCOPE,
            code_challenge_method="S256",
            timeout=_DEADLINE,
            verify=self._tls,
        )
        try:
            async with asyncio.timeout(_DEADLINE), client:
                yield client
        except (PermissionDenied, InvalidRequest):
            raise
        except _FAILURES as error:
            why = describe(error).partition("\n")[0][:200]
            raise SignInFailed(
                f"the provider {self.host} does not answer properly now ({why}); try again, or "
                "sign in with an API key"
            ) from error

    async def _discover(self) -> ProviderMetadata:
        """Return the provider's metadata, which one request reads for all who wait. Raises
        `SignInFailed`."""
        async with self._discovering:
            if self._discovered[0] <= self._clock():
                try:
                    self._discovered = (self._clock() + _KEPT, await self._read_metadata())
                except SignInFailed as failure:
                    self._discovered = (self._clock() + _RETRY_AFTER, failure.message)
            found = self._discovered[1]
        if isinstance(found, str):
            raise SignInFailed(found)
        return found

    async def _read_metadata(self) -> ProviderMetadata:
        url = f"{self.settings.issuer.rstrip('/')}/.well-known/openid-configuration"
        async with self._client() as client:
            found = ProviderMetadata.model_validate(await _fetch(client, url))
            if found.issuer != self.settings.issuer:
                raise ValueError(f"its issuer is {found.issuer[:200]}, not that of TANDEM_OIDC")
            addresses = [url for url in found.model_dump().values() if url]
            if not all(map(_is_safe, addresses)):
                raise ValueError("it names an address without https")
        return found

    async def _key_set(self, client: AsyncOAuth2Client) -> KeySet:
        now = self._clock()
        if self._keys is None or self._keys[0] <= now:
            answer = await _fetch(client, (await self._discover()).jwks_uri)
            try:
                keys = KeySet.import_key_set(answer)
            except (LookupError, TypeError) as error:
                raise ValueError("its keys have another form") from error
            self._keys = (now + _KEPT, keys)
        return self._keys[1]


async def _fetch(client: AsyncOAuth2Client, url: str, *, withhold_token: bool = True) -> Any:
    answer = await client.request("GET", url, withhold_token=withhold_token)
    found = answer.raise_for_status().json()
    if not isinstance(found, dict):
        raise ValueError("its answer is no JSON object")
    return found


def _is_safe(url: str) -> bool:
    """Return whether nobody on the network can read or change a request."""
    parts = urlsplit(url)
    return parts.scheme == "https" or (parts.scheme == "http" and is_loopback(parts.hostname or ""))
