"""create_custom_loss: a traced loss is checked and kept."""

from __future__ import annotations

from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response

from gateway.api.wire import (
    caller_of,
    gateway_of,
    json_response,
    note_for_audit,
    parse,
    read_body,
)
from tandem.custom_loss import MAX_BYTES
from tandem.errors import CustomLossInvalid


class CreateCustomLoss(BaseModel):
    """The rest of the body, the graph, is read by `tandem.custom_loss`."""

    session_id: str = Field(max_length=64)
    custom_loss_seq_id: int = Field(ge=0, lt=10**9)


async def create_custom_loss(request: Request) -> Response:
    """Registers a traced loss. A promise of `{"loss_id"}`, which is kept already. A graph that
    is not allowed is refused at once, so that the SDK raises its typed error at once."""
    gateway = gateway_of(request)
    raw = await read_body(request)
    if len(raw) > MAX_BYTES:
        raise CustomLossInvalid(f"the custom loss has {len(raw)} bytes, {MAX_BYTES} at most")
    body = parse(CreateCustomLoss, raw)
    await gateway.access.session(body.session_id, caller_of(request))
    loss_id = await gateway.custom_losses.create(
        session_id=body.session_id, number=body.custom_loss_seq_id, definition=raw
    )
    note_for_audit(request, target=loss_id)
    return json_response({"request_id": loss_id})
