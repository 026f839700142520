"""The public description of a key, for the routes and for `gateway/admin/offline_keys.py`, without
FastAPI."""

from __future__ import annotations

from typing import Literal

from gateway.api.fields import Answer, Time
from gateway.owners.auth.keys import Key, KeyStore, Role


class KeyInfo(Answer):
    """A key without its secret."""

    id: str
    owner: str
    role: Role
    name: str
    state: Literal["active", "expired", "revoked"]
    created_at: Time
    expires_at: Time | None
    revoked_at: Time | None
    last_used_at: Time | None
    local: bool


class NewKeyInfo(KeyInfo):
    """A new key with its secret, shown once."""

    key: str


def described(keys: KeyStore, key: Key) -> KeyInfo:
    return KeyInfo.of(key, state=keys.ended(key) or "active")
