"""The FastAPI application: routers, middleware, error handlers, lifespan."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from fastapi import FastAPI

from gateway import custom_losses
from gateway.api import openapi
from gateway.api.errors import ErrorResponses
from gateway.api.middleware import RequestBoundary, RequestReservations
from gateway.api.openai.errors import PREFIX, OpenAIDialect
from gateway.api.openai.routes import router as openai
from gateway.api.openai.service import InferenceService
from gateway.api.routing import PathOperation
from gateway.api.tandem import keys, status
from gateway.api.tinker import (
    auth,
    billing,
    checkpoints,
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
from gateway.workers.fleet import ChannelFactory, open_channel
from gateway.workers.launchers import Launcher, make_launcher
from tandem.errors import TandemError
from tandem.settings import GatewaySettings

ROUTERS = (
    futures.router,
    sampling.router,
    openai,
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
    status.metrics_router,
    openapi.router,
)
"""In the order of how often they are called: routes are tried one after the other."""


def create_app(
    settings: GatewaySettings,
    *,
    launcher: Launcher | None = None,
    channel_factory: ChannelFactory = open_channel,
) -> FastAPI:
    """Return the gateway as an application; it lives as long as the lifespan.

    `launcher` starts the workers (by default the one that the settings name), `channel_factory`
    opens the channels to them. While it runs, the `Gateway` is `app.state.gateway`.
    """
    launcher = launcher or make_launcher(settings)
    metrics = Metrics()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        opened = Gateway.open(
            settings, launcher=launcher, metrics=metrics, channel_factory=channel_factory
        )
        try:
            async with opened as gateway, Housekeeping(gateway).running():
                app.state.gateway = gateway
                app.state.inference = InferenceService(gateway)
                custom_losses.provide(gateway)
                yield
        except TandemError as error:
            app.state.start_error = error.message
            raise

    app = FastAPI(
        title="Tandem", lifespan=lifespan, openapi_url=None, docs_url=None, redoc_url=None
    )
    app.state.metrics = metrics
    app.state.start_error = ""
    for router in ROUTERS:
        app.include_router(router)
    app.include_router(custom_losses.router)
    app.openapi = partial(openapi.document, app)  # type: ignore[method-assign]
    errors = ErrorResponses({PREFIX: OpenAIDialect()})
    errors.register(app)
    app.add_middleware(RequestReservations, errors=errors)
    app.add_middleware(RequestBoundary, routes=path_operations(app), errors=errors)
    return app


def path_operations(app: FastAPI) -> list[PathOperation]:
    """Return every route. Raises `TypeError` for one that was registered without a role."""
    found = [route for route in app.routes if isinstance(route, PathOperation)]
    if len(found) != len(app.routes):
        raise TypeError("a route was registered without a role; use `gateway.api.routing.Router`")
    return found
