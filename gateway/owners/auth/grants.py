"""Grants: the keys of people who signed in at a provider of OpenID Connect.

A grant is a key whose secret nobody has, with the role and the hours of the first fitting rule. A
page session is one of its key, so `tandem keys revoke` ends both. A person has one grant in all
browsers: each sign-in changes its role, or ends it and gives another owner's. A person without a
rule loses it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

from gateway.owners.auth.identity import Caller
from gateway.owners.auth.keys import KeyStore
from tandem.errors import PermissionDenied
from tandem.settings.chosen_names import OWNER_PATTERN
from tandem.settings.oidc import OidcSettings

_ADDRESS = re.compile(OWNER_PATTERN.removesuffix("$"))


async def grant_access(
    claims: Mapping[str, Any], *, settings: OidcSettings, keys: KeyStore
) -> Caller:
    """Return the caller for a person's verified claims. `expires_at` is the end of the access.
    Raises `PermissionDenied`."""
    email = _confirmed_email(claims)
    groups = claims.get("groups")
    groups = groups if isinstance(groups, list) else [groups]
    rule = next((r for who, r in settings.rules.items() if _fits(who, email, groups)), None)
    shown = email or "an account without a confirmed e-mail address"
    person = sha256(f"{settings.issuer} {claims['sub']}".encode()).hexdigest()[:40]
    if rule is None or not (rule.owner or _ADDRESS.fullmatch(email)):
        await keys.end_grants(person)
    if rule is None:
        raise PermissionDenied(
            f"no rule lets {shown} sign in here; ask an admin of this gateway for one (TANDEM_OIDC)"
        )
    if not (rule.owner or _ADDRESS.fullmatch(email)):
        raise PermissionDenied(
            f"no owner can be named after {shown}; ask an admin of this gateway for a rule with an "
            "owner"
        )
    key = await keys.grant(
        person,
        owner=rule.owner or email,
        named=rule.owner is not None,
        role=rule.role,
        seconds=rule.hours * 3600,
    )
    return Caller(owner=key.owner, key_id=key.id, role=key.role, expires_at=key.expires_at)


def _confirmed_email(claims: Mapping[str, Any]) -> str:
    """Return the address in lower case, "" for none that the provider has confirmed. A letter
    outside ASCII could become another person's letter in lower case."""
    email, confirmed = claims.get("email"), claims.get("email_verified")
    if not isinstance(email, str) or confirmed not in (True, "true"):
        return ""
    return email.lower() if email.isascii() and email.count("@") == 1 else ""


def _fits(who: str, email: str, groups: list[object]) -> bool:
    if who.startswith("group:"):
        return who.removeprefix("group:") in groups
    return bool(email) and (email if who[0] != "@" else email[email.index("@") :]) == who.lower()
