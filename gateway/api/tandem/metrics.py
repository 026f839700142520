"""Metrics, for Prometheus."""

from __future__ import annotations

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.requests import Request
from starlette.responses import Response

from gateway.api.wire import gateway_of


async def metrics(request: Request) -> Response:
    """The gateway's metrics, in Prometheus' text form."""
    registry = gateway_of(request).metrics.registry
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)
