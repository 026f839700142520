"""Where a gateway may listen with the keys that it has."""

from __future__ import annotations

from ipaddress import ip_address

from gateway.auth.keys import KeyStore
from tandem.errors import InvalidRequest
from tandem.settings import GatewaySettings


def check_listening(settings: GatewaySettings, *, keys: KeyStore) -> None:
    """Raises `InvalidRequest` where others could reach a gateway whose only key is the local
    one, which was made for this machine."""
    if is_loopback(settings.host) or keys.any_given_out():
        return
    raise InvalidRequest(
        f"the gateway would listen on {settings.host}, where others reach it, and has no key but "
        "the local one; make one first: tandem keys create --owner NAME --role admin "
        f"--data-dir {settings.data_dir}"
    )


def is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
