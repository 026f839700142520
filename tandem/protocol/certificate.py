"""Certificates for TLS between gateway, agents and workers (`channels`).

A certificate names a worker by its id, or says `agent` or `gateway`. It holds no address, because a
pod's address is unknown before its start. One `authority` signs all. Workers' and agents'
certificates are valid only for servers, so none of them can pose as the gateway."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from tandem.errors import InvalidRequest

AGENT_NAME = "agent"
GATEWAY_NAME = "gateway"


class Certificate(BaseModel):
    """A certificate, its key, and the authority's certificate, in PEM."""

    model_config = ConfigDict(frozen=True, hide_input_in_errors=True)

    certificate: str
    key: str = Field(repr=False)
    authority: str


def read_certificate(folder: Path) -> Certificate:
    """Read `tls.crt`, `tls.key` and `ca.crt`, the names of a kubernetes.io/tls Secret. Raises
    `InvalidRequest`."""
    try:
        return Certificate(
            certificate=(folder / "tls.crt").read_text(),
            key=(folder / "tls.key").read_text(),
            authority=(folder / "ca.crt").read_text(),
        )
    except OSError as error:
        raise InvalidRequest(
            f"the certificate cannot be read: {error.filename}: {error.strerror}; "
            "`tandem tls issue` makes one"
        ) from error
