"""retrieve_future: the result of what was accepted, by long poll."""

from __future__ import annotations

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from gateway.futures import Future, Outcome, Waiting
from gateway.names import split_request_id
from gateway.routes.wire import JSON, PROTOBUF, gateway_of, json_response, parse, read_body
from tandem.errors import TandemError, UnknownRequest

WEIGHT_VERSION_HEADER = "X-Tandem-Weight-Version"


class Retrieve(BaseModel):
    request_id: str


async def retrieve_future(request: Request) -> Response:
    """200 with the result, or with `{"error", "category", "type"}` where the operation failed;
    408 while it has not ended; 410 for a sample that is to be asked for again; 404 else."""
    gateway = gateway_of(request)
    request_id = parse(Retrieve, await read_body(request)).request_id
    future = gateway.futures.get(request_id)
    if future is not None:
        outcome = await gateway.futures.wait(future, timeout=gateway.settings.long_poll)
        return _try_again(future) if outcome is None else _answer(outcome)
    recalled = await gateway.oplog.recall(request_id)
    recalled = recalled or await gateway.custom_losses.recall(request_id)
    if recalled is not None and not isinstance(recalled, UnknownRequest):
        return _answer(recalled)
    owner = split_request_id(request_id)
    if owner is not None and ":sample:" in owner[0] and await gateway.sampling.known(owner[0]):
        body = {
            "error": f"the sample {request_id} is no longer here; ask for it again",
            "type": UnknownRequest.type,
            "category": "server",
        }
        return json_response(body, status=410)
    raise recalled or UnknownRequest(f"there is no request {request_id!r} on this server")


def _answer(outcome: Outcome) -> Response:
    if isinstance(outcome, TandemError):
        # The SDK shows its user the sentence alone, so that the type is part of it.
        return json_response(
            {
                "error": f"{outcome.type}: {outcome.message}",
                "type": outcome.type,
                "category": outcome.category,
            }
        )
    headers = {WEIGHT_VERSION_HEADER: outcome.weight_version} if outcome.weight_version else None
    media = PROTOBUF if outcome.media == "protobuf" else JSON
    return Response(outcome.body, media_type=media, headers=headers)


def _try_again(future: Future) -> Response:
    waiting: Waiting = future.describe()
    return json_response(
        {
            "type": "try_again",
            "request_id": future.request_id,
            "queue_state": "paused_capacity" if waiting.paused else "active",
            "queue_state_reason": waiting.reason,
        },
        status=408,
    )
