"""The FastAPI application, and the uvicorn server that runs it and announces itself in
`gateway.json`."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import cast

import uvicorn
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.api import description, http_connection
from gateway.api.errors import ErrorResponses
from gateway.api.http_connection import GRACEFUL_SECONDS, BoundedProtocol, Connections
from gateway.api.middleware import RequestBoundary
from gateway.api.openai import traces
from gateway.api.openai.anthropic import anthropic_refusal
from gateway.api.openai.routes import MESSAGES, PREFIX, TRACES_PREFIX, openai_refusal
from gateway.api.openai.routes import router as openai
from gateway.api.openai.service import InferenceService
from gateway.api.pages import chat, compare, devices, oidc, rollouts, sign_in, trial
from gateway.api.pages import playground as playground_page
from gateway.api.pages import run as run_page
from gateway.api.pages import runs as runs_page
from gateway.api.pages.routing import unknown_page
from gateway.api.pages.run_views import RunViews
from gateway.api.routing import PathOperation, identify
from gateway.api.tandem import (
    backends,
    ends,
    groups,
    jobs,
    keys,
    logprobs,
    logs,
    owners,
    playground,
    record,
    runs,
    samplers,
    samples,
    sampling_sessions,
    status,
    targets,
    usage,
)
from gateway.api.tinker import (
    auth,
    billing,
    checkpoints,
    custom_losses,
    futures,
    sampling,
    service,
    sessions,
    training,
    training_runs,
)
from gateway.core import Gateway
from gateway.housekeeping import Housekeeping
from gateway.metrics import Metrics
from gateway.owners.auth.bootstrap import read_bootstrap_key
from gateway.owners.counted_lines import CountedLines
from gateway.runs.stopping import Stop
from gateway.storage.data_directory import write_file
from gateway.storage.drivers import is_postgresql
from gateway.storage.leadership import Leadership
from gateway.workers.epoch import Epoch, epoch_without_leader
from gateway.workers.launchers import Launcher, for_each_kind, load_launcher, make_launchers
from tandem.agent.process_identity import process_start
from tandem.errors import StorageFailed, TandemError, UserError, describe
from tandem.protocol.heartbeat import send_heartbeats
from tandem.protocol.worker import set_process_limits
from tandem.settings.gateway import GatewaySettings
from tandem.stack import ENDPOINT_NAME, SENTENCE, Endpoint
from tandem.telemetry import configure_logging, get_log

_SUPERSEDED = (
    "another gateway has taken over from this one; if there is no other, start the agent again, too"
)
_TICK = 0.1
_LAST_REQUESTS = 0.03
"""Seconds for which a stopping gateway answers requests. Each answer closes its connection. A
request that crosses the end of an idle connection is lost, and the SDK repeats it only after a
second."""
_DRAIN_POLL = 0.005
"""Seconds between two looks for unfinished answers."""
_COLLECTIONS = (2_000, 5, 1_000_000)
"""Thresholds of the garbage collector's three generations. A burst of requests keeps many objects
alive, and a frequent second collection of 100,000 objects stopped the event loop for 0.15 s. A tick
decides about the third one."""
_FULL_COLLECTION, _LATEST_FULL_COLLECTION = 300, 6_000
"""Second collections until a full one, which takes 0.6 s for a million objects, usually and while
many samples wait. There are ten in a second then."""
_MANY_SAMPLES = 1_000

ROUTERS = (
    futures.router,
    sampling.router,
    openai,
    traces.agent_router,
    traces.anthropic_router,
    traces.anthropic_agent_router,
    training.router,
    sessions.router,
    training_runs.router,
    auth.router,
    billing.router,
    auth.audit_router,
    service.router,
    checkpoints.router,
    checkpoints.files_router,
    sessions.files_router,
    status.router,
    checkpoints.own_router,
    keys.router,
    owners.router,
    usage.router,
    groups.router,
    backends.router,
    samplers.router,
    runs.router,
    ends.router,
    jobs.router,
    playground.router,
    record.router,
    samples.router,
    logprobs.router,
    sampling_sessions.router,
    traces.router,
    targets.router,
    logs.router,
    status.root_router,
    description.router,
    custom_losses.router,
    sign_in.router,
    oidc.router,
    runs_page.router,
    run_page.router,
    compare.router,
    devices.router,
    chat.router,
    playground_page.router,
    trial.router,
    rollouts.router,
)
"""The most frequent routes first, since routes are tried in order."""


def _exit() -> None:
    """End this process at once, without `finally` clauses."""
    os._exit(1)


def create_app(
    settings: GatewaySettings,
    *,
    launcher: Launcher | None = None,
    end: Callable[[], object] = _exit,
) -> FastAPI:
    """Return the gateway as an application, with the lifetime of its lifespan.

    `launcher` starts workers (default: the one in the settings). The running `Gateway` is
    `app.state.gateway`. `end` is called after another gateway's takeover: this one must then touch
    nothing, not even its workers."""
    metrics, stop = Metrics(), Stop(tell=_tell)
    opened = asyncio.Event()

    def superseded() -> None:
        _tell(_SUPERSEDED)
        end()

    @asynccontextmanager
    async def serving(app: FastAPI, *, leadership: Leadership | None = None) -> AsyncIterator[None]:
        if leadership is not None:
            number = leadership.epoch
        else:
            number = epoch_without_leader(of_cluster=settings.launcher == "kubernetes")
        epoch = Epoch(number=number, superseded=superseded)
        found = Gateway.open(
            settings,
            launchers=for_each_kind(launcher) if launcher else make_launchers(settings, epoch),
            metrics=metrics,
            epoch=epoch,
            leadership=leadership,
            stop=stop,
        )
        async with found as gateway, Housekeeping(gateway).running():
            app.state.gateway = gateway
            app.state.inference = InferenceService(gateway)
            app.state.run_views = RunViews(gateway)
            opened.set()
            yield

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        try:
            # A standby that could not take over must not start.
            read_bootstrap_key(settings)
            load_launcher(settings)
            if is_postgresql(settings.database_url):
                async with _serving_as_leader(
                    app, settings, serving=partial(serving, app), opened=opened, end=end
                ):
                    yield
            else:
                async with serving(app):
                    yield
        except Exception as error:
            app.state.start_error = _sentence(error)
            app.state.misused = isinstance(error, UserError)
            raise

    app = FastAPI(
        title="Tandem",
        lifespan=lifespan,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.metrics = metrics
    app.state.stop = stop
    app.state.start_error = ""
    app.state.misused = False
    for router in ROUTERS:
        app.include_router(router)
    app.openapi = partial(description.document, app)  # type: ignore[method-assign]
    errors = ErrorResponses(
        {MESSAGES: anthropic_refusal, PREFIX: openai_refusal, TRACES_PREFIX: openai_refusal}
    )
    errors.register(app)
    app.state.on_opened = lambda: None
    app.add_middleware(
        RequestBoundary,
        settings=settings,
        metrics=metrics,
        errors=errors,
        opened=opened,
        longest_wait=futures.LONG_POLL,
    )
    app.add_middleware(_StartBoundary)
    app.router.default = _unknown_path
    path_operations(app)
    return app


class _StartBoundary:
    """Replaces the traceback of a user's mistake at the start by a sentence."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def without_traceback(message: Message) -> None:
            state = scope["app"].state
            if message["type"] == "lifespan.startup.failed" and state.misused:
                message = {"type": message["type"], "message": state.start_error}
            await send(message)

        await self._app(scope, receive, without_traceback if scope["type"] == "lifespan" else send)


@asynccontextmanager
async def _serving_as_leader(
    app: FastAPI,
    settings: GatewaySettings,
    *,
    serving: Callable[..., AbstractAsyncContextManager[None]],
    opened: asyncio.Event,
    end: Callable[[], object],
) -> AsyncIterator[None]:
    """Serve as the leader, at once or later. Meanwhile the application answers as a
    standby."""
    found = Leadership.open(url=settings.database_url, timeout=settings.leader_timeout)
    async with found as leadership:
        async with AsyncExitStack() as stack:

            async def follow() -> None:
                why = _SUPERSEDED
                try:
                    if not opened.is_set():
                        await leadership.wait()
                        await stack.enter_async_context(serving(leadership=leadership))
                        app.state.on_opened()
                    await leadership.lost()
                except Exception as error:  # noqa: BLE001 - whoever started it does so again
                    why = _sentence(error)
                    get_log().error("not_taken_over", reason=why)
                _tell(why)
                end()

            if await leadership.take():
                await stack.enter_async_context(serving(leadership=leadership))
            else:
                get_log().info("standing_by", holder=leadership.holder)
            following = asyncio.create_task(follow(), name="leadership")
            yield
            if not opened.is_set():
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)
        following.cancel()  # it has counted the beats until here


async def _unknown_path(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer an unknown path, only for a valid key."""
    if (page := unknown_page(Request(scope))) is not None:
        await page(scope, receive, send)
        return
    identify(scope)
    raise HTTPException(404)


def path_operations(app: FastAPI) -> list[PathOperation]:
    """Return all routes. Raises `TypeError` for a route without a role."""
    found = [route for route in app.routes if isinstance(route, PathOperation)]
    if len(found) != len(app.routes):
        raise TypeError("a route was registered without a role; use `gateway.api.routing.Router`")
    return found


class GatewayServer(uvicorn.Server):
    """Announces itself when it listens, and ends long polls at shutdown."""

    def __init__(
        self, config: uvicorn.Config, *, connections: Connections, malformed: CountedLines
    ) -> None:
        super().__init__(config)
        self._connections = connections
        self._malformed = malformed
        self._asked_to_exit = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets)
        except SystemExit as stop:  # uvicorn raises it if it cannot listen
            if isinstance(cause := stop.__context__, OSError):
                cast(FastAPI, self.config.app).state.start_error = self._why_deaf(cause)
            raise
        if self.started:
            _keep_what_is_loaded()
            get_log().info("listening", url=self.url)
            state = cast(FastAPI, self.config.app).state
            state.on_opened = self._announce
            if hasattr(state, "gateway"):
                self._announce()
            # Not before, because loading blocks the event loop, for long on a slow machine.
            self._heart = asyncio.create_task(send_heartbeats())

    async def main_loop(self) -> None:
        """Return when asked to exit. A signal ends the wait for the next tick."""
        self._loop = asyncio.get_running_loop()
        counter = 0
        while not await self.on_tick(counter):
            counter += 1
            with suppress(TimeoutError):
                await asyncio.wait_for(self._asked_to_exit.wait(), _TICK)

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second."""
        self._malformed.write()
        if gc.isenabled():
            self._collect_garbage()
        return await super().on_tick(counter)

    def _collect_garbage(self) -> None:
        state = cast(FastAPI, self.config.app).state
        many = hasattr(state, "gateway") and self.gateway.limits.samples.total > _MANY_SAMPLES
        if many:
            # The collector counts new objects less freed ones. While many requests end, it would
            # wait for half a million new ones, and then stop the loop for 0.3 s.
            gc.collect(1)
        if gc.get_count()[2] >= (_LATEST_FULL_COLLECTION if many else _FULL_COLLECTION):
            gc.collect()

    def _announce(self) -> None:
        pid = os.getpid()
        endpoint = Endpoint(
            url=self.url, pid=pid, process_start=process_start(pid), api_key=self.gateway.api_key
        )
        write_file(self._announcement, endpoint.model_dump_json().encode())

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle SIGTERM and SIGINT, also before the start and after the end."""
        cast(FastAPI, self.config.app).state.stop.ask(sig)
        self.should_exit = True
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._asked_to_exit.set)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen no more, finish the answers, and close the gateway.

        uvicorn's own method sleeps for a tenth of a second at least twice, which a standby's
        clients would wait for."""
        if hasattr(cast(FastAPI, self.config.app).state, "gateway"):
            self._announcement.unlink(missing_ok=True)
        for server in self.servers:
            server.close()
        self._connections.ending = True
        await self._connections_end(within=_LAST_REQUESTS)
        if hasattr(cast(FastAPI, self.config.app).state, "gateway"):
            self.gateway.futures.release_waiters()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        await self._connections_end(within=GRACEFUL_SECONDS)
        for task in self.server_state.tasks:
            task.cancel()
        await self.lifespan.shutdown()
        self._malformed.write(closing=True)

    async def _connections_end(self, *, within: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(within):
                while self.server_state.connections or self.server_state.tasks:  # noqa: ASYNC110
                    await asyncio.sleep(_DRAIN_POLL)

    def _why_deaf(self, error: OSError) -> str:
        used = error.errno == errno.EADDRINUSE
        reason = "another program listens there" if used else error.strerror or describe(error)
        return (
            f"the gateway cannot listen on {self.config.host}:{self.config.port}: {reason}; choose "
            "another address with --host (TANDEM_HOST) or --port (TANDEM_PORT; 0: any free one)"
        )

    @property
    def gateway(self) -> Gateway:
        return cast(Gateway, cast(FastAPI, self.config.app).state.gateway)

    @property
    def _announcement(self) -> Path:
        return self.gateway.settings.private / ENDPOINT_NAME

    @property
    def url(self) -> str:
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def make_server(app: FastAPI, settings: GatewaySettings) -> GatewayServer:
    metrics = app.state.metrics
    malformed = CountedLines(
        metrics.malformed_requests, first="malformed_request", more="malformed_requests"
    )
    connections = Connections(http_connection.MAX_CONNECTIONS, metrics=metrics)
    protocol = partial(
        BoundedProtocol,
        metrics=metrics,
        all_connections=connections,
        malformed=malformed,
    )
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
        timeout_keep_alive=http_connection.KEEP_ALIVE,
    )
    return GatewayServer(config, connections=connections, malformed=malformed)


def _tell(sentence: str) -> None:
    """Print a sentence for the starting process, if it still reads."""
    with suppress(OSError):
        print(f"{SENTENCE}{sentence}", file=sys.stderr, flush=True)


def _sentence(error: Exception) -> str:
    """Return a one-line reason for the starting process. It includes the cause of a storage
    error."""
    if isinstance(error, StorageFailed) and isinstance(error.__cause__, Exception):
        error = getattr(error.__cause__, "orig", None) or error.__cause__
    if isinstance(error, TandemError):
        return error.message
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    return describe(error, typed=True).partition(chr(10))[0]


def _keep_what_is_loaded() -> None:
    """Freeze the loaded classes, routes and schemas, because a full collection over them stops the
    event loop for 0.1 s. Then turn collections on."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_COLLECTIONS)
    gc.enable()


def run(settings: GatewaySettings) -> int:
    """Serve until SIGTERM or SIGINT. Return the exit status."""
    configure_logging(service="gateway", level=settings.log_level)
    set_process_limits()
    app = create_app(settings)
    server = make_server(app, settings)
    for number in (signal.SIGTERM, signal.SIGINT):  # before this, they end the process
        signal.signal(number, server.handle_exit)
    with suppress(SystemExit):  # uvicorn raises it if it cannot start
        server.run()
    if app.state.start_error:
        _tell(app.state.start_error)
    return 0 if server.started else 1
