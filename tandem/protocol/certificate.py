"""A certificate of a gateway, an agent or a worker, for TLS between them (`channels`).

It names a worker by its id, or says `agent` or `gateway`; the addresses are no part of
it, since a pod's is known only when it runs. One authority signs all (`authority`). What a
certificate may be used for is written in it: those of workers and agents for servers only, so that
none of them can call an agent as if it were the gateway.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from tandem.errors import InvalidRequest

AGENT_NAME = "agent"
GATEWAY_NAME = "gateway"


class Certificate(BaseModel):
    """A certificate, its key, and the certificate of the authority that signed it and signs those
    of its peers, all in PEM."""

    model_config = ConfigDict(frozen=True, hide_input_in_errors=True)

    certificate: str
    key: str = Field(repr=False)
    authority: str


def read_certificate(folder: Path) -> Certificate:
    """Return that of `tls.crt`, `tls.key` and `ca.crt`, as a Secret of the type kubernetes.io/tls
    names them. Raises `InvalidRequest`."""
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
