"""/openapi.json: made once, when somebody first asks for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import orjson
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from gateway.api.description.base import Answer, Binary, Described
from gateway.api.description.document import Operation, document, operations
from gateway.api.description.inference import INFERENCE
from gateway.api.description.management import MANAGEMENT
from gateway.api.description.table import Handler
from gateway.api.description.training import TRAINING

OPENAPI = "/openapi.json"


async def openapi(request: Request) -> Response:
    """This description. It holds nothing of this server but its version; a gateway that
    listens on loopback shows it without a key."""
    app: FastAPI = request.app
    body = getattr(app.state, "openapi", None)
    if body is None:
        body = app.state.openapi = orjson.dumps(document(described_operations(app)))
    return Response(body, media_type="application/json")


def described_operations(app: FastAPI) -> Sequence[Operation]:
    """Every route of the application. Raises `LookupError` for one without a description."""
    return operations(app, _TABLE)


_OPENAPI = Described(
    answers={200: Answer(contents=(Binary("application/json", "An OpenAPI 3.1 document"),))},
    tag="Tandem",
)
_TABLE: Mapping[Handler, Described] = {
    **TRAINING,
    **MANAGEMENT,
    **INFERENCE,
    openapi: _OPENAPI,
}
