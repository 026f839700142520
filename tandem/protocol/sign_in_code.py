"""The code in the link of `tandem up`, which signs a browser in without typing the key.

It has the form `ISSUED.NONCE.SIGNATURE`, signed with the local key (HMAC-SHA256). The gateway takes
it once, within an hour."""

from __future__ import annotations

import hashlib
import hmac
import secrets

CODE_SECONDS = 3600


def make_code(api_key: str, *, now: float) -> str:
    """`now` is in seconds since 1970."""
    stated = f"{int(now)}.{secrets.token_urlsafe(12)}"
    return f"{stated}.{_signature(stated, api_key)}"


def code_issued_at(code: str, api_key: str) -> int | None:
    """Return the time of issue in seconds since 1970, None for a code of another key."""
    stated, _, signature = code.rpartition(".")
    if not hmac.compare_digest(signature.encode(), _signature(stated, api_key).encode()):
        return None
    return int(stated.partition(".")[0])


def _signature(stated: str, api_key: str) -> str:
    return hmac.new(api_key.encode(), f"sign-in:{stated}".encode(), hashlib.sha256).hexdigest()
