"""The loss "custom": made for one request from the graph that the client traced."""

from __future__ import annotations

from tandem.errors import UnsupportedInput
from trainer_service.losses.base import Loss

CUSTOM = "custom"


def custom_loss(definition: bytes) -> Loss:
    """The loss of a JSON body of create_custom_loss. Raises `UnsupportedInput`."""
    raise UnsupportedInput("this trainer takes no custom loss; compute it on the client's side")
