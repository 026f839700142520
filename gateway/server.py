"""The gateway as a process: a uvicorn server, announced in `gateway.json` while it listens."""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import signal
import socket
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import cast

import orjson
import uvicorn
from fastapi import FastAPI

from gateway.app import create_app
from gateway.core import Gateway
from gateway.http_connection import BoundedProtocol
from gateway.storage.data_directory import write_private
from tandem.errors import TandemError
from tandem.settings import GatewaySettings
from tandem.stack import ENDPOINT_NAME
from tandem.telemetry import configure_logging, get_log

_GRACEFUL_SECONDS = 5
_OBJECTS_BETWEEN_COLLECTIONS = 10_000


class GatewayServer(uvicorn.Server):
    """Announces itself when it listens, and ends the long polls when it shuts down."""

    def __init__(self, config: uvicorn.Config, *, app: FastAPI, endpoint: Path) -> None:
        super().__init__(config)
        self._app = app
        self._endpoint = endpoint

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            _keep_what_is_loaded()
            endpoint = {"url": self.url, "pid": os.getpid(), "api_key": self.gateway.api_key}
            write_private(self._endpoint, orjson.dumps(endpoint))
            get_log().info("listening", url=self.url)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._endpoint.unlink(missing_ok=True)
        self.gateway.futures.release_waiters()
        await super().shutdown(sockets)

    @property
    def gateway(self) -> Gateway:
        """The gateway that the application serves, once it has started."""
        return cast(Gateway, self._app.state.gateway)

    @property
    def url(self) -> str:
        """Where clients of this machine reach it."""
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def make_server(app: FastAPI, settings: GatewaySettings) -> GatewayServer:
    """Return a server for an application of `create_app`. It does not run yet."""
    protocol = partial(BoundedProtocol, settings=settings.http, metrics=app.state.metrics)
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        loop="uvloop",
        http=cast(type[asyncio.Protocol], protocol),
        ws="none",
        lifespan="on",
        access_log=False,
        server_header=False,
        log_config=None,
        backlog=4096,
        timeout_keep_alive=settings.http.keep_alive,
        timeout_graceful_shutdown=_GRACEFUL_SECONDS,
    )
    return GatewayServer(config, app=app, endpoint=settings.data_dir / ENDPOINT_NAME)


def _keep_what_is_loaded() -> None:
    """Take what was loaded so far out of the garbage collector's sight: classes, routes and
    schemas live as long as the process, and a full collection that looks through them stops the
    event loop for 0.1 s and more."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_OBJECTS_BETWEEN_COLLECTIONS, 10, 10)


def _set_process_limits() -> None:
    """Make new files readable only by their owner, and write no core dumps, which would contain
    the secrets in memory. Allow many connections: each is an open file, and the usual soft limit
    is 1024. Workers inherit all three."""
    os.umask(0o077)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    most_files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))


def run(settings: GatewaySettings) -> int:
    """Serve until SIGTERM or SIGINT; return the exit status."""
    configure_logging(service="gateway", level=settings.log_level)
    _set_process_limits()
    settings.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    # uvicorn handles these signals while it serves, and raises them again afterwards, when
    # everything is stopped already.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    try:
        app = create_app(settings)
    except TandemError as error:  # a setting that names nothing
        print(f"tandem gateway: {error.message}", file=sys.stderr)
        return 1
    server = make_server(app, settings)
    with suppress(SystemExit):  # uvicorn raises it if it cannot start
        server.run()
    if app.state.start_error:
        print(f"tandem gateway: {app.state.start_error}", file=sys.stderr)
    return 0 if server.started else 1
