"""Identifies callers by a key or by a token exchanged for a key.

A token is a JWT (RFC 7519, HS256) signed with the data directory's key. It becomes invalid with its
key, which also decides owner and role."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import jwt
from sqlalchemy import ColumnElement, true

from gateway.owners.auth.keys import KeyStore, Role
from tandem.errors import TokenRefused, Unauthenticated

ORGANIZATION = "tandem"
USER_URN = "tml:organization_user:"
"""The prefix of the SDK's `user_urn`, before the owner's name."""

_ALGORITHM = "HS256"
_ISSUER = "tandem-gateway"
_REMEMBERED = 1024
"""Tokens with a remembered signature check, which takes 90 µs."""

Scope = Literal["owned", "accessible"]
"""Owned things, or all visible ones. An admin sees everything, as a maintainer does at
some routes."""


Reach = Literal["own", "all", "blueprints"]
"""The things of one's own owner, of all owners, or of one's own sessions of blueprints."""


@dataclass(frozen=True)
class Caller:
    """A request's sender. `key_id` (`k-…`) does not reveal the key. `expires_at` (seconds since
    1970) is the token's expiry, None for a key. The route sets `reach`."""

    owner: str
    key_id: str
    role: Role
    expires_at: float | None = None
    reach: Reach = "own"

    @property
    def urn(self) -> str:
        return urn_of(self.owner)

    @property
    def may_change(self) -> bool:
        return self.role in ("admin", "maintainer", "member", "ci")

    @property
    def may_use_page(self) -> bool:
        """Whether the page offers its forms. Their routes need a member."""
        return self.may_change and self.role != "ci"

    @property
    def sees_all(self) -> bool:
        return self.role == "admin" or self.reach == "all"

    def may_see(self, owner: str) -> bool:
        return self.sees_all or (owner == self.owner and self.role != "metrics")


@dataclass(frozen=True)
class Readers:
    """The callers with a right to read a checkpoint: the sender, and the owner of a second key or
    token."""

    callers: tuple[Caller, ...]

    def may_read(self, *, owner: str, public: bool) -> bool:
        return public or any(caller.may_see(owner) for caller in self.callers)


@dataclass(eq=False, repr=False, kw_only=True)
class Identity:
    """`token_ttl` is in seconds."""

    keys: KeyStore
    signing_key: bytes
    token_ttl: float = 3600.0
    clock: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        self._read = lru_cache(maxsize=_REMEMBERED)(self._verify)

    def identify(self, credential: bytes) -> Caller:
        """Return the caller. Raises `TokenRefused` for an invalid token, else `Unauthenticated`.
        Only the holder of a key learns of its revocation."""
        if credential.startswith(b"eyJ"):
            return self._of_token(credential)
        key = self.keys.find(credential)
        if key is None:
            raise Unauthenticated(
                "the API key is missing or wrong; `tandem up` prints the local one, and an admin "
                "makes others with `tandem keys create` (TINKER_API_KEY)"
            )
        if ended := self.keys.ended(key):
            raise Unauthenticated(
                f"the API key {key.id} {'was' if ended == 'revoked' else 'has'} {ended}; ask an "
                "admin for a new one (`tandem keys create`)"
            )
        self.keys.note_use(key)
        return Caller(owner=key.owner, key_id=key.id, role=key.role)

    def issue(self, caller: Caller) -> str:
        """Return a token for the caller. It expires with the key and with the caller's own token,
        so that a token cannot renew itself."""
        now = self.clock()
        key = self.keys.get(caller.key_id)
        ends = [caller.expires_at, key.expires_at if key is not None else None]
        expires_at = min([now + self.token_ttl, *(end for end in ends if end is not None)])
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
        return jwt.encode(claims, self.signing_key, algorithm=_ALGORITHM)

    def _of_token(self, token: bytes) -> Caller:
        key_id, expires_at = self._read(token)
        if expires_at <= self.clock():
            raise TokenRefused("the token has expired; exchange the key for a new one")
        key = self.keys.get(key_id)
        if key is None or self.keys.ended(key) is not None:
            raise TokenRefused("the key that this token was exchanged for is no longer valid")
        self.keys.note_use(key)
        return Caller(owner=key.owner, key_id=key.id, role=key.role, expires_at=expires_at)

    def _verify(self, token: bytes) -> tuple[str, float]:
        try:
            claims = jwt.decode(
                token,
                self.signing_key,
                algorithms=[_ALGORITHM],
                issuer=_ISSUER,
                options={"require": ["exp", "iat", "iss", "sub", "key", "role"]},
            )
        except jwt.ExpiredSignatureError as error:
            raise TokenRefused("the token has expired; exchange the key for a new one") from error
        except jwt.PyJWTError as error:
            raise TokenRefused(f"the token is not one of this gateway's: {error}") from error
        return str(claims["key"]), float(claims["exp"])


def visible(owner: ColumnElement[str], caller: Caller, scope: Scope) -> ColumnElement[bool]:
    if scope == "accessible" and caller.sees_all:
        return true()
    return owner == caller.owner


def urn_of(owner: str) -> str:
    """Return the SDK's name of an owner, such as `"tml:organization_user:local"`."""
    return f"{USER_URN}{owner}"
