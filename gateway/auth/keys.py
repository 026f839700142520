"""The keys that callers present: made, found, revoked.

A key is `tml-` and 256 random bits. The database holds its SHA-256, which suffices for a secret
that nobody can guess; the key itself is shown once. All keys are in memory, too, so that no
request waits for the database, and a revocation counts from its moment on.

One key has no row: the local one, of the data directory or of `TANDEM_API_KEY`.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, cast

from sqlalchemy import RowMapping, bindparam, insert, select, update

from gateway.storage.database import Database
from gateway.storage.tables import keys
from tandem.errors import InvalidRequest, UnknownKey

Role = Literal["admin", "member", "reader"]

LOCAL_OWNER = "local"
LONGEST_LIFE = 10 * 366 * 86_400.0
"""Seconds until a key expires, at most."""

_OWNER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]{0,63}")
_SECRET_BYTES = 32
_NO_DIGEST = bytes(32)

_NOTE_USE = (
    update(keys)
    .where(keys.c.id == bindparam("this_key"))
    .values(last_used_at=bindparam("this_time"))
)


@dataclass(frozen=True)
class Key:
    """What is known of a key. Times are seconds since 1970. `digest` is its SHA-256."""

    id: str
    digest: bytes
    owner: str
    role: Role
    name: str = ""
    created_at: float = 0.0
    expires_at: float | None = None
    revoked_at: float | None = None
    local: bool = False

    @property
    def number(self) -> int:
        """The SDK's form of the id."""
        return int(self.id.removeprefix("k-"), 16)


@dataclass(frozen=True)
class NewKey:
    """What is asked for. `expires_in` in seconds; None: it does not expire."""

    owner: str
    role: Role
    name: str = ""
    expires_in: float | None = None


class KeyStore:
    def __init__(self, *, database: Database, clock: Callable[[], float] = time.time) -> None:
        self._database = database
        self._clock = clock
        self._keys: dict[str, Key] = {}
        self._used: dict[str, float] = {}
        self._unwritten: set[str] = set()

    async def open(self) -> None:
        for row in await self._database.read(select(keys)):
            key = _key_of(row)
            self._keys[key.id] = key
            if row["last_used_at"] is not None:
                self._used[key.id] = row["last_used_at"]

    def set_local(self, secret: str) -> Key:
        """The key of this machine's admin; another one that was set before is good no more."""
        self._keys = {id_: key for id_, key in self._keys.items() if not key.local}
        digest = digest_of(secret.encode())
        key = Key(
            id=id_of(digest),
            digest=digest,
            owner=LOCAL_OWNER,
            role="admin",
            name="local-key",
            created_at=self._clock(),
            local=True,
        )
        self._keys[key.id] = key
        return key

    def find(self, secret: bytes) -> Key | None:
        """The key, also one that is revoked or has expired. What is compared, and how long it
        takes, depends on the hash alone, from which no key can be told."""
        digest = digest_of(secret)
        key = self._keys.get(id_of(digest))
        same = hmac.compare_digest(digest, key.digest if key is not None else _NO_DIGEST)
        return key if same else None

    def get(self, key_id: str) -> Key | None:
        return self._keys.get(key_id)

    def all(self) -> list[Key]:
        """In the order of their creation, the local one first."""
        return sorted(self._keys.values(), key=lambda key: (not key.local, key.created_at))

    def last_used_at(self, key: Key) -> float | None:
        return self._used.get(key.id)

    def ended(self, key: Key) -> str | None:
        """Why a key is not good any more; None while it is."""
        if key.revoked_at is not None:
            return "revoked"
        if key.expires_at is not None and key.expires_at <= self._clock():
            return "expired"
        return None

    def any_given_out(self) -> bool:
        """Whether there is a good key beside the local one."""
        return any(not key.local and self.ended(key) is None for key in self._keys.values())

    async def create(self, new: NewKey) -> tuple[Key, str]:
        """The new key and its secret, which is not kept. Raises `InvalidRequest`."""
        _check(new)
        secret = f"tml-{secrets.token_urlsafe(_SECRET_BYTES)}"
        digest = digest_of(secret.encode())
        now = self._clock()
        key = Key(
            id=id_of(digest),
            digest=digest,
            owner=new.owner,
            role=new.role,
            name=new.name,
            created_at=now,
            expires_at=now + new.expires_in if new.expires_in is not None else None,
        )
        await self._database.write(
            insert(keys),
            {
                "id": key.id,
                "digest": key.digest,
                "owner": key.owner,
                "role": key.role,
                "name": key.name,
                "created_at": key.created_at,
                "expires_at": key.expires_at,
            },
        )
        self._keys[key.id] = key
        return key, secret

    async def revoke(self, key_id: str) -> Key:
        """From now on the key, and every token that was exchanged for it, is refused. Asked
        again, nothing changes. Raises `UnknownKey`, or `InvalidRequest` for the local key."""
        key = self._keys.get(key_id)
        if key is None:
            raise UnknownKey(f"there is no key {key_id[:100]!r}; `tandem keys list` shows them")
        if key.local:
            raise InvalidRequest(
                f"{key.id} is the local key, which cannot be revoked here; to replace it, stop the "
                "gateway, remove the file api_key in its data directory (or change "
                "TANDEM_API_KEY) and start it again"
            )
        if key.revoked_at is None:
            key = self._keys[key_id] = replace(key, revoked_at=self._clock())
        await self._database.write(
            update(keys).where(keys.c.id == key_id).values(revoked_at=key.revoked_at)
        )
        return key

    def note_use(self, key: Key) -> None:
        self._used[key.id] = self._clock()
        if not key.local:
            self._unwritten.add(key.id)

    def write_uses(self) -> None:
        """Hands over when keys were last used, as far as that changed."""
        changed, self._unwritten = self._unwritten, set()
        if changed:
            self._database.write_soon(
                _NOTE_USE,
                *({"this_key": key_id, "this_time": self._used[key_id]} for key_id in changed),
            )


def digest_of(secret: bytes) -> bytes:
    return hashlib.sha256(secret).digest()


def id_of(digest: bytes) -> str:
    """Literal example: `k-9f86d081884c`."""
    return f"k-{digest[:6].hex()}"


def _check(new: NewKey) -> None:
    if not _OWNER.fullmatch(new.owner):
        raise InvalidRequest(
            f"the owner {new.owner[:80]!r} is not allowed: 1 to 64 of A-Z a-z 0-9 . _ @ + -, "
            "with a letter or digit in front"
        )
    if len(new.name) > 100 or not new.name.isprintable():
        raise InvalidRequest("the name of a key has 100 printable characters at most")
    if new.expires_in is not None and not 0 < new.expires_in <= LONGEST_LIFE:
        raise InvalidRequest(
            f"a key cannot expire after {new.expires_in:g} s; it lives for more than 0 and at "
            f"most {LONGEST_LIFE:.0f} s (ten years)"
        )


def _key_of(row: RowMapping) -> Key:
    return Key(
        id=row["id"],
        digest=bytes(row["digest"]),
        owner=row["owner"],
        role=cast(Role, row["role"]),
        name=row["name"],
        created_at=row["created_at"],
        expires_at=row["expires_at"],
        revoked_at=row["revoked_at"],
    )
