"""gRPC channels to workers and agents, and the TLS credentials of servers. No channel uses a
proxy."""

from __future__ import annotations

from collections.abc import Sequence

import grpc
import grpc.aio

from tandem.protocol.certificate import Certificate
from tandem.protocol.worker import GRPC_OPTIONS, WorkerHandle

_NO_PROXY = ("grpc.enable_http_proxy", 0)


def worker_channel(handle: WorkerHandle) -> grpc.aio.Channel:
    """Return a new channel to a worker, with TLS unless it listens only on loopback."""
    if not handle.authority:
        return plain_channel(handle.address, options=GRPC_OPTIONS)
    return secure_channel(
        handle.address, authority=handle.authority, name=handle.worker_id, options=GRPC_OPTIONS
    )


def plain_channel(address: str, *, options: Sequence[tuple[str, int]]) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(address, options=[*options, _NO_PROXY])


def secure_channel(
    address: str,
    *,
    authority: str,
    name: str,
    options: Sequence[tuple[str, int]],
    own: Certificate | None = None,
) -> grpc.aio.Channel:
    """Return a channel to the server with a certificate of this name, at any address.

    `own` is the client's certificate, for servers that request one."""
    credentials = grpc.ssl_channel_credentials(
        root_certificates=authority.encode(),
        private_key=own.key.encode() if own else None,
        certificate_chain=own.certificate.encode() if own else None,
    )
    named = ("grpc.ssl_target_name_override", name)
    return grpc.aio.secure_channel(address, credentials, options=[*options, named, _NO_PROXY])


def server_credentials(own: Certificate, *, clients: bool) -> grpc.ServerCredentials:
    """Return a server's credentials. With `clients`, callers need the gateway's certificate."""
    return grpc.ssl_server_credentials(
        [(own.key.encode(), own.certificate.encode())],
        root_certificates=own.authority.encode() if clients else None,
        require_client_auth=clients,
    )
