"""Who is calling: keys, the tokens that are exchanged for them, and the caller they name.

A caller presents in X-API-Key either the key itself or a JWT that was exchanged for it (RFC
7519, HS256, signed with the data directory's signing key). A token names its key, so that it
ends with the key, and is refused when another algorithm, issuer or signature is in it.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import jwt

from tandem.errors import TokenRefused, Unauthenticated

Role = Literal["admin", "user"]

ORGANIZATION = "tandem"
LOCAL_OWNER = "local"
USER_URN = "tml:organization_user:"
"""What the SDK's `user_urn`s begin with; the owner's name follows."""

_ALGORITHM = "HS256"
_ISSUER = "tandem-gateway"
_REMEMBERED = 256
"""Tokens whose signature was checked already, so that it is not checked for each request."""


@dataclass(frozen=True)
class Caller:
    """Whose request it is. `key_id` names the key without telling anything of it; `expires_at`
    (seconds since 1970) is that of the token, None where the key itself was presented."""

    owner: str
    key_id: int
    role: Role
    expires_at: float | None = None

    @property
    def urn(self) -> str:
        return urn_of(self.owner)

    def may_see(self, owner: str) -> bool:
        return owner == self.owner or self.role == "admin"


class Identity:
    """Knows the one key of this gateway, whose owner is `local`. Keys are asked for when they
    are needed, since they are read when the gateway opens; `token_ttl` in seconds."""

    def __init__(
        self,
        *,
        api_key: Callable[[], str],
        signing_key: Callable[[], bytes],
        token_ttl: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._api_key = api_key
        self._signing_key = signing_key
        self._token_ttl = token_ttl
        self._clock = clock
        self._checked: OrderedDict[bytes, Caller] = OrderedDict()

    def identify(self, credential: bytes) -> Caller:
        """Raises `TokenRefused` for a token that is not or no longer good, `Unauthenticated`
        for anything else that is not the key."""
        key = self._api_key()
        if hmac.compare_digest(credential, key.encode()):
            return Caller(owner=LOCAL_OWNER, key_id=key_id_of(key), role="admin")
        if credential.startswith(b"eyJ"):
            return self._of_token(credential)
        raise Unauthenticated(
            "the API key is missing or wrong; `tandem up` prints the right one (TINKER_API_KEY)"
        )

    def issue(self, caller: Caller) -> str:
        """A token for the caller. One that was itself exchanged for a token lives no longer
        than that one, so that a token cannot renew itself for ever."""
        now = self._clock()
        expires_at = now + self._token_ttl
        if caller.expires_at is not None:
            expires_at = min(expires_at, caller.expires_at)
        claims = {
            "iss": _ISSUER,
            "sub": caller.urn,
            "org_id": ORGANIZATION,
            "email": "",
            "iat": int(now),
            "exp": int(expires_at),
            "key": caller.key_id,
            "role": caller.role,
        }
        return jwt.encode(claims, self._signing_key(), algorithm=_ALGORITHM)

    def _of_token(self, token: bytes) -> Caller:
        caller = self._checked.get(token)
        if caller is None:
            caller = self._read(token)
            self._checked[token] = caller
            if len(self._checked) > _REMEMBERED:
                self._checked.popitem(last=False)
        if caller.expires_at is not None and caller.expires_at <= self._clock():
            del self._checked[token]
            raise TokenRefused("the token has expired; exchange the key for a new one")
        if caller.key_id != key_id_of(self._api_key()):
            raise TokenRefused("the key that this token was exchanged for is no longer good")
        return caller

    def _read(self, token: bytes) -> Caller:
        try:
            claims = jwt.decode(
                token,
                self._signing_key(),
                algorithms=[_ALGORITHM],
                issuer=_ISSUER,
                options={"require": ["exp", "iat", "iss", "sub", "key", "role"]},
            )
        except jwt.ExpiredSignatureError as error:
            raise TokenRefused("the token has expired; exchange the key for a new one") from error
        except jwt.PyJWTError as error:
            raise TokenRefused(f"the token is not one of this gateway's: {error}") from error
        return Caller(
            owner=str(claims["sub"]).removeprefix(USER_URN),
            key_id=claims["key"],
            role=claims["role"],
            expires_at=float(claims["exp"]),
        )


def urn_of(owner: str) -> str:
    """Literal example: `"local"` gives `"tml:organization_user:local"`."""
    return f"{USER_URN}{owner}"


def key_id_of(api_key: str) -> int:
    """A number for a key, from which the key cannot be found: 48 bits of its SHA-256."""
    return int.from_bytes(hashlib.sha256(api_key.encode()).digest()[:6], "big")
