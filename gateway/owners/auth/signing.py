"""Signs cursors and addresses with the data directory's signing key."""

from __future__ import annotations

import base64
import hmac
import time

import orjson

from tandem.errors import AddressExpired, AddressForged


def sign(key: bytes, *parts: object) -> str:
    """Return an HMAC-SHA256 of the parts, 43 characters that are safe in an address.

    The parts are signed as a JSON list, so no two lists give equal bytes. The first part is the
    purpose (`"trace"`, `"download"`), for which alone the signature is valid."""
    digest = hmac.digest(key, orjson.dumps(parts, option=orjson.OPT_SORT_KEYS), "sha256")
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode("ascii")


def is_signed(key: bytes, signature: str, *parts: object) -> bool:
    """Compare a signature with that of the parts, in constant time."""
    return hmac.compare_digest(sign(key, *parts).encode(), signature.encode())


def sign_address(key: bytes, *parts: str, expires: int) -> dict[str, str]:
    """Return the query of an address that is valid until `expires` (seconds since 1970)."""
    return {"expires": str(expires), "signature": sign(key, *parts, str(expires))}


def check_address(
    key: bytes, *parts: str, expires: str, signature: str, what: str, renew: str
) -> None:
    """Raise `AddressForged` for a wrong signature or `AddressExpired`. The messages contain `what`
    (a name for the address) and `renew` (advice)."""
    if not is_signed(key, signature, *parts, expires):
        raise AddressForged(f"{what} was not signed here, or was altered; {renew}")
    if time.time() >= int(expires):
        raise AddressExpired(f"{what} has expired; {renew}")
