"""The bootstrap key: a gateway's first admin key, from a file.

A gateway in a container cannot run `tandem keys create` before it listens. It reads
`TANDEM_BOOTSTRAP_KEY_FILE`, such as a mounted Secret, and stores the key's hash. A new key revokes
the old one. With PostgreSQL, only the leader does this."""

from __future__ import annotations

import re

from gateway.owners.auth.audit import AuditLog, Entry
from gateway.owners.auth.keys import BOOTSTRAP_NAME, KeyStore
from tandem.errors import InvalidRequest
from tandem.settings.gateway import GatewaySettings
from tandem.telemetry import get_log

_KEY = re.compile(r"tml-[A-Za-z0-9_-]{32,200}")
"""The SDK's format, with at least 128 random bits in any usual encoding."""

_HOW = 'make one with: echo "tml-$(openssl rand -hex 32)"'


def read_bootstrap_key(settings: GatewaySettings) -> str:
    """Return the key, "" if none is set. Raise `InvalidRequest`, with a message that omits
    the key."""
    if (path := settings.bootstrap_key_file) is None:
        return ""
    source = f"TANDEM_BOOTSTRAP_KEY_FILE ({path})"
    try:
        key = path.read_bytes().decode(errors="replace").strip()
    except OSError as error:
        raise InvalidRequest(f"{source} cannot be read: {error.strerror}") from error
    if not _KEY.fullmatch(key):
        raise InvalidRequest(
            f"the key of {source} must be `tml-` and 32 to 200 letters, digits, `-` or `_`; {_HOW}"
        )
    return key


async def take_bootstrap_key(settings: GatewaySettings, *, keys: KeyStore, audit: AuditLog) -> None:
    """Make the key valid, unless it was revoked before, and revoke its predecessor. Idempotent.
    Raises `InvalidRequest`."""
    secret = read_bootstrap_key(settings)
    if not secret:
        return
    known = keys.find(secret.encode())
    if known is None:
        key, former = await keys.replace_bootstrap(secret)
        for action, changed in [("apikey_create", key), *(("apikey_delete", k) for k in former)]:
            get_log().info("bootstrap_key", action=action, key=changed.id)
            about = {"owner": changed.owner, "role": changed.role, "name": changed.name}
            audit.record(Entry.of_local(action, changed.id, **about))
    elif known.local or known.name != BOOTSTRAP_NAME:
        raise InvalidRequest(
            f"the bootstrap key is already the key {known.id} of {known.owner}, and must be one of "
            f"its own; {_HOW}"
        )
    elif keys.ended(known) is not None:
        hint = "a key that was revoked stays so; put a new one into its place"
        get_log().warning("bootstrap_key_revoked", key=known.id, hint=hint)
