"""The losses that one request may name: the registry, and "custom" if it brought its own."""

from __future__ import annotations

from collections.abc import Mapping

from trainer_service.losses.base import Loss
from trainer_service.losses.custom import CUSTOM, custom_loss


def losses_for(*, registry: Mapping[str, Loss], definition: bytes) -> Mapping[str, Loss]:
    """`definition` is `ForwardBackwardRequest.loss_definition`, empty where there is none.

    Every rank calls this with the same bytes. Raises a `UserError` for a definition that is not
    one, or that asks for what is not allowed.
    """
    if not definition:
        return registry
    return {**registry, CUSTOM: custom_loss(definition)}
