"""Creates, finds and revokes API keys.

A key is `tml-` and 256 random bits. It is shown once, and the database stores its SHA-256. All keys
are also in memory, so a revocation works at once. The local key, from the data directory or
`TANDEM_API_KEY`, has no row. The bootstrap key (`bootstrap.py`) has one with a reserved name."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, Field
from sqlalchemy import bindparam, delete, insert, select, update

from gateway.storage.database import Database, from_row
from gateway.storage.tables import keys
from tandem.errors import InvalidRequest, PermissionDenied, UnknownKey
from tandem.protocol.http_host import is_loopback
from tandem.settings.chosen_names import OWNER_PATTERN, Label
from tandem.settings.gateway import GatewaySettings

Role = Literal["admin", "maintainer", "member", "ci", "reader", "metrics"]
"""A maintainer is a member that also drains groups, and sees and stops the work of all owners. `ci`
works in sessions of blueprints only. `metrics` may only scrape metrics."""

LOCAL_OWNER = "local"
BOOTSTRAP_NAME = "bootstrap-key"
GRANT_PREFIX = "oidc:"
"""Begins the names of grants (`grants.py`)."""
_ENDS_BY_ITSELF = re.compile(rf"{GRANT_PREFIX}.*|trial-[0-9a-f]{{12}}")
"""The names of grants, and of keys of the programs of trials in the playground."""
LONGEST_LIFE = 10 * 366 * 86_400.0
"""Longest life of a key, in seconds."""


@dataclass
class Key:
    """A key without its secret. `digest` is its SHA-256. Times are in seconds since 1970."""

    id: str
    digest: bytes
    owner: str
    role: Role
    name: str
    created_at: float
    expires_at: float | None = None
    revoked_at: float | None = None
    last_used_at: float | None = None
    local: bool = False

    @property
    def number(self) -> int:
        """The id as a number, the SDK's type."""
        return int(self.id.removeprefix("k-"), 16)


def _key_name(name: str) -> str:
    if name == BOOTSTRAP_NAME:
        raise ValueError(f"the name {name!r} is that of the key of TANDEM_BOOTSTRAP_KEY_FILE")
    if name.startswith(GRANT_PREFIX):
        raise ValueError(f"names that begin with {GRANT_PREFIX!r} are those of grants")
    return name


class NewKey(BaseModel):
    """A key to create. `expires_in` is in seconds, None for no expiry."""

    owner: str = Field(pattern=OWNER_PATTERN)
    role: Role
    name: Annotated[Label, Field(max_length=100), AfterValidator(_key_name)] = ""
    expires_in: float | None = Field(None, gt=0, le=LONGEST_LIFE, allow_inf_nan=False)


class KeyStore:
    def __init__(self, *, database: Database, clock: Callable[[], float] = time.time) -> None:
        self._database = database
        self._clock = clock
        self._keys: dict[str, Key] = {}
        self._unwritten: set[str] = set()
        self._granting = asyncio.Lock()

    async def open(self) -> None:
        rows = await self._database.read(select(keys))
        self._keys = {row["id"]: from_row(Key, row) for row in rows}

    def set_local(self, secret: str) -> Key:
        self._keys = {id_: key for id_, key in self._keys.items() if not key.local}
        new = NewKey(owner=LOCAL_OWNER, role="admin", name="local-key")
        key = self._key(secret, new, local=True)
        self._keys[key.id] = key
        return key

    def find(self, secret: bytes) -> Key | None:
        """Return the key, even if it has ended. The comparison's time reveals nothing."""
        digest = digest_of(secret)
        key = self._keys.get(id_of(digest))
        same = key is not None and hmac.compare_digest(digest, key.digest)
        return key if same else None

    def get(self, key_id: str) -> Key | None:
        return self._keys.get(key_id)

    def all(self) -> list[Key]:
        return sorted(self._keys.values(), key=lambda key: (not key.local, key.created_at))

    def ended(self, key: Key) -> Literal["revoked", "expired"] | None:
        if key.revoked_at is not None:
            return "revoked"
        if key.expires_at is not None and key.expires_at <= self._clock():
            return "expired"
        return None

    async def create(self, new: NewKey) -> tuple[Key, str]:
        """Return the new key and its secret, which is not stored."""
        secret = f"tml-{secrets.token_urlsafe(32)}"
        key = self._key(secret, new)
        await self._database.write(insert(keys), _row(key), durable=True)
        self._keys[key.id] = key
        return key, secret

    async def replace_bootstrap(self, secret: str) -> tuple[Key, list[Key]]:
        """Add a bootstrap key and revoke the old ones in one transaction. Return it and them."""
        new = NewKey(owner=LOCAL_OWNER, role="admin")
        key = replace(self._key(secret, new), name=BOOTSTRAP_NAME)
        former = [
            each
            for each in self._keys.values()
            if each.name == BOOTSTRAP_NAME and self.ended(each) is None
        ]
        await self._database.write_together(
            insert(keys).values(_row(key)),
            update(keys)
            .where(keys.c.id.in_([each.id for each in former]))
            .values(revoked_at=key.created_at),
            durable=True,
        )
        for each in former:
            each.revoked_at = key.created_at
        self._keys[key.id] = key
        return key, former

    async def grant(
        self, person: str, *, owner: str, named: bool, role: Role, seconds: float
    ) -> Key:
        """Return the person's grant, valid for `seconds` from now: an earlier one of the owner, or
        a new key whose secret nobody has. It ends the person's grants of other owners, even if it
        raises. So all browsers of the person have one owner and one role.

        Raises `PermissionDenied` if the person's grant was revoked and would still be valid, or if
        the owner has keys and neither the person has one of them nor a rule has `named` it."""
        name = f"{GRANT_PREFIX}{person}"
        async with self._granting:
            await self._end_grants(name, except_of=owner)
            now = self._clock()
            mine = [key for key in self._keys.values() if key.name == name]
            if any(key.revoked_at is not None and (key.expires_at or 0) > now for key in mine):
                raise PermissionDenied(
                    "an admin has ended your access; ask an admin of this gateway, or come back "
                    "after the hours of that access"
                )
            owned = [key for key in self._keys.values() if key.owner == owner]
            if owned and not named and not any(key.name == name for key in owned):
                raise PermissionDenied(
                    f"the owner {owner} exists and is somebody else; ask an admin of this gateway "
                    "for a rule that names your owner"
                )
            for key in mine:
                if key.owner == owner and key.revoked_at is None:
                    statement = (
                        update(keys)
                        .where(keys.c.id == key.id)
                        .values(role=role, expires_at=now + seconds)
                    )
                    await self._database.write(statement, durable=True)
                    key.role, key.expires_at = role, now + seconds
                    return key
            new = NewKey(owner=owner, role=role, expires_in=seconds)
            key = replace(self._key(f"tml-{secrets.token_urlsafe(32)}", new), name=name)
            await self._database.write(insert(keys), _row(key), durable=True)
            self._keys[key.id] = key
            return key

    async def end_grants(self, person: str) -> None:
        """End the person's grants now. A later sign-in can give a new one."""
        async with self._granting:
            await self._end_grants(f"{GRANT_PREFIX}{person}")

    async def _end_grants(self, name: str, *, except_of: str | None = None) -> None:
        now = self._clock()
        ended = [
            key
            for key in self._keys.values()
            if key.name == name and key.owner != except_of and self.ended(key) is None
        ]
        for key in ended:
            key.expires_at = now
        if ended:
            these = keys.c.id.in_([key.id for key in ended])
            await self._database.write(
                update(keys).where(these).values(expires_at=now), durable=True
            )

    async def revoke(self, key_id: str) -> Key:
        """Revoke the key and its tokens at once. Idempotent. Raises `UnknownKey`, or
        `InvalidRequest` for the local key."""
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
            key.revoked_at = self._clock()
        await self._database.write(
            update(keys).where(keys.c.id == key_id).values(revoked_at=key.revoked_at),
            durable=True,
        )
        return key

    async def remove(self, key_id: str) -> None:
        """Revoke a key at once and forget it. Idempotent."""
        self._keys.pop(key_id, None)
        self._unwritten.discard(key_id)
        await self._database.write(delete(keys).where(keys.c.id == key_id), durable=True)

    def _key(self, secret: str, new: NewKey, *, local: bool = False) -> Key:
        digest, now = digest_of(secret.encode()), self._clock()
        return Key(
            id=id_of(digest),
            digest=digest,
            owner=new.owner,
            role=new.role,
            name=new.name,
            created_at=now,
            expires_at=now + new.expires_in if new.expires_in is not None else None,
            local=local,
        )

    def note_use(self, key: Key) -> None:
        key.last_used_at = self._clock()
        if not key.local:
            self._unwritten.add(key.id)

    def write_uses(self) -> None:
        changed, self._unwritten = self._unwritten, set()
        if changed:
            self._database.write_soon(
                update(keys).where(keys.c.id == bindparam("key_id")),
                *({"key_id": id_, "last_used_at": self._keys[id_].last_used_at} for id_ in changed),
            )


def _row(key: Key) -> dict[str, object]:
    return {column.name: getattr(key, column.name) for column in keys.c}


def check_listening(settings: GatewaySettings, *, keys: KeyStore) -> None:
    """Raise `InvalidRequest` if other machines could reach a gateway with only the local key. Keys
    that end by themselves do not count."""
    lasting = (k for k in keys.all() if not (k.local or _ENDS_BY_ITSELF.fullmatch(k.name)))
    others = (key for key in lasting if keys.ended(key) is None)
    if is_loopback(settings.host) or any(others):
        return
    raise InvalidRequest(
        f"the gateway would listen on {settings.host}, where others reach it, and has no valid key "
        "but the local one; give it one with TANDEM_BOOTSTRAP_KEY_FILE, or "
        "make one first: tandem keys create --owner NAME --role admin "
        f"--data-dir {settings.data_dir}"
    )


def digest_of(secret: bytes) -> bytes:
    return hashlib.sha256(secret).digest()


def id_of(digest: bytes) -> str:
    """Example: `k-9f86d081884c`."""
    return f"k-{digest[:6].hex()}"
