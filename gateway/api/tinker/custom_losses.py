"""Registers custom losses, which are traced graphs."""

from __future__ import annotations

from pydantic import BaseModel, Field

from gateway.api.dependencies import AccessDep
from gateway.api.fields import Answer
from gateway.api.routing import Router
from tandem.errors import CustomLossInvalid, SessionFinished, UnknownSession

router = Router("/api/v1", tag="SDK")


class CreateCustomLoss(BaseModel):
    """The fields for the gateway. `tandem.custom_losses` reads the rest."""

    session_id: str = Field(max_length=64)
    custom_loss_seq_id: int = Field(ge=0, lt=10**9)


class CustomLossAccepted(Answer):
    """`request_id` is also the loss id."""

    request_id: str


@router.operation(
    "POST",
    "/create_custom_loss",
    role="ci",
    audit="loss_create",
    errors=[UnknownSession, SessionFinished, CustomLossInvalid],
    rules=["The rest of the body is the traced loss (docs/training.md)."],
)
async def create_custom_loss(body: CreateCustomLoss, access: AccessDep) -> CustomLossAccepted:
    """Register a traced loss. An invalid one is refused at once, so that the SDK raises its typed
    error."""
    session = await access.session(body.session_id)
    loss_id = await access.gateway.custom_losses.create(
        session_id=session.id,
        owner=session.owner,
        number=body.custom_loss_seq_id,
        definition=await access.raw_body(),
    )
    access.audit.note(loss_id)
    return CustomLossAccepted(request_id=loss_id)
