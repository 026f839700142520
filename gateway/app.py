"""The FastAPI application."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route

from gateway import custom_losses
from gateway.api.access import guarded
from gateway.api.admission_middleware import RequestReservations
from gateway.api.description.served import OPENAPI, openapi
from gateway.api.middleware import RequestBoundary
from gateway.api.openai.errors import PREFIX as OPENAI
from gateway.api.openai.errors import openai_http_error
from gateway.api.openai.routes import (
    openai_chat_completions,
    openai_completions,
    openai_model,
    openai_models,
)
from gateway.api.openai.service import InferenceService
from gateway.api.tandem import keys, status
from gateway.api.tandem import metrics as scrape
from gateway.api.tinker import (
    audit,
    auth,
    billing,
    checkpoints,
    create_model,
    downloads,
    futures,
    sampling,
    service,
    sessions,
    training,
    training_runs,
)
from gateway.api.wire import error_response, json_response
from gateway.checkpoints.downloads import PREFIX
from gateway.core import Gateway
from gateway.housekeeping import Housekeeping
from gateway.metrics import Metrics
from gateway.usage.trace_exports import PREFIX as TRACES
from gateway.workers.fleet import ChannelFactory, open_channel
from gateway.workers.launchers import Launcher, make_launcher
from tandem.errors import TandemError
from tandem.settings import GatewaySettings


def create_app(
    settings: GatewaySettings,
    *,
    launcher: Launcher | None = None,
    channel_factory: ChannelFactory = open_channel,
) -> FastAPI:
    """The gateway as an application; its life is that of the lifespan.

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
    app.add_middleware(RequestReservations)
    app.add_middleware(RequestBoundary)
    app.add_exception_handler(TandemError, _tandem_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.router.routes.extend(guarded(_routes()))
    custom_losses.install(app)
    return app


def _routes() -> list[Route]:
    """In the order of how often they are called: routes are tried one after the other."""
    api = "/api/v1"
    own = "/api/tandem/v1"
    named = f"{api}/training_runs/{{run_id}}/checkpoints/{{kind}}/{{name}}"
    return [
        Route(f"{api}/retrieve_future", futures.retrieve_future, methods=["POST"]),
        Route(f"{api}/retrieve_futures", futures.retrieve_futures, methods=["POST"]),
        Route(f"{api}/cancel_future", futures.cancel_future, methods=["POST"]),
        Route(f"{api}/asample", sampling.asample, methods=["POST"]),
        Route("/v1/chat/completions", openai_chat_completions, methods=["POST"]),
        Route("/v1/completions", openai_completions, methods=["POST"]),
        Route("/v1/models", openai_models),
        Route("/v1/models/{model:path}", openai_model),
        Route(f"{api}/forward_backward", training.forward_backward, methods=["POST"]),
        Route(f"{api}/optim_step", training.optim_step, methods=["POST"]),
        Route(f"{api}/session_heartbeat", service.session_heartbeat, methods=["POST"]),
        Route(
            f"{api}/save_weights_for_sampler", training.save_weights_for_sampler, methods=["POST"]
        ),
        Route(f"{api}/save_weights", training.save_weights, methods=["POST"]),
        Route(f"{api}/save_weights_external", training.save_weights_external, methods=["POST"]),
        Route(f"{api}/load_weights", training.load_weights, methods=["POST"]),
        Route(f"{api}/create_model", create_model.create_model, methods=["POST"]),
        Route(f"{api}/get_info", training.get_info, methods=["POST"]),
        Route(f"{api}/create_sampling_session", sampling.create_sampling_session, methods=["POST"]),
        Route(f"{api}/join_sampling_session", sampling.join_sampling_session, methods=["POST"]),
        Route(f"{api}/samplers/{{sampler_id}}", sampling.get_sampler),
        Route(f"{api}/create_session", service.create_session, methods=["POST"]),
        Route(f"{api}/sessions/{{session_id}}/finish", service.finish_session, methods=["POST"]),
        Route(f"{api}/sessions", sessions.list_sessions),
        Route(f"{api}/sessions/search", sessions.search_sessions, methods=["POST"]),
        Route(f"{api}/sessions/{{session_id}}", sessions.get_session),
        Route(
            f"{api}/sessions/{{session_id}}/project",
            sessions.assign_session_project,
            methods=["PUT"],
        ),
        Route(f"{api}/sessions/{{session_id}}/trace_export", sessions.trace_export),
        Route(f"{TRACES}{{file}}", sessions.trace_file),
        Route(f"{api}/auth/token", auth.exchange_token, methods=["POST"]),
        Route(f"{api}/auth/apikey/me", auth.own_key),
        Route(f"{api}/auth/apikey/me", auth.delete_own_key, methods=["DELETE"]),
        Route(f"{api}/billing/usage/events", billing.usage_events),
        Route(f"{api}/billing/usage/checkpoints/current", billing.checkpoint_storage),
        Route(f"{api}/audit", audit.audit_log),
        Route(f"{api}/forward", service.forward_of_old_sdk, methods=["POST"]),
        Route(f"{api}/telemetry", service.telemetry, methods=["POST"]),
        Route(f"{api}/client/config", service.client_config, methods=["POST"]),
        Route(f"{api}/client/dynamic_config", service.dynamic_config, methods=["POST"]),
        Route(f"{api}/get_server_capabilities", service.capabilities),
        Route(f"{api}/healthz", service.healthz),
        Route(f"{api}/weights_info", checkpoints.weights_info, methods=["POST"]),
        Route(f"{api}/copy_weights", checkpoints.copy_weights, methods=["POST"]),
        Route(f"{api}/checkpoints", checkpoints.user_checkpoints),
        Route(named, checkpoints.delete_checkpoint, methods=["DELETE"]),
        Route(f"{named}/publish", checkpoints.publish_checkpoint, methods=["POST"]),
        Route(f"{named}/publish", checkpoints.unpublish_checkpoint, methods=["DELETE"]),
        Route(f"{named}/ttl", checkpoints.set_checkpoint_ttl, methods=["PUT"]),
        Route(f"{named}/external_weights_urls", checkpoints.external_weights_urls),
        Route(
            f"{PREFIX}{{run_id}}/{{kind}}/{{name}}/{{file}}", downloads.download, methods=["GET"]
        ),
        Route(f"{api}/training_runs", training_runs.training_runs),
        Route(f"{api}/training_runs/{{run_id}}", training_runs.training_run),
        Route(f"{api}/training_runs/{{run_id}}/checkpoints", checkpoints.run_checkpoints),
        Route(f"{own}/status", status.status),
        Route(f"{own}/checkpoints/files", checkpoints.checkpoint_files),
        Route(f"{own}/models", status.list_models),
        Route(f"{own}/models", status.add_model, methods=["POST"]),
        Route(f"{own}/models/{{name:path}}", status.remove_model, methods=["DELETE"]),
        Route(f"{own}/keys", keys.list_keys),
        Route(f"{own}/keys", keys.create_key, methods=["POST"]),
        Route(f"{own}/keys/{{key_id}}", keys.revoke_key, methods=["DELETE"]),
        Route(f"{own}/config", status.config),
        Route(f"{own}/version", status.get_version),
        Route("/metrics", scrape.metrics),
        Route(OPENAPI, openapi),
    ]


async def _tandem_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, TandemError)
    return error_response(error, path=request.url.path)


async def _http_error(request: Request, error: Exception) -> Response:
    """What the router refuses: an unknown path, or another method."""
    assert isinstance(error, HTTPException)
    sentence = f"{request.method} {request.url.path}: {error.detail}"
    if request.url.path.startswith(OPENAI):
        response = openai_http_error(sentence, status=error.status_code)
    else:
        body = {"error": sentence, "type": "unknown_endpoint", "category": "user"}
        response = json_response(body, status=error.status_code)
    if error.status_code == 405:
        response.headers["Allow"] = ", ".join(_methods_at(request))
    return response


def _methods_at(request: Request) -> list[str]:
    """What the path takes: the router itself knows of the first route alone that has it."""
    routes = [route for route in request.app.routes if isinstance(route, Route)]
    matching = (route for route in routes if route.matches(request.scope)[0] is not Match.NONE)
    first = next(matching)
    same = (route.methods or set() for route in routes if route.path == first.path)
    return sorted(set[str]().union(*same))
