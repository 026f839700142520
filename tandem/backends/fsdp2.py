"""The description of Tandem's own step backend."""

from __future__ import annotations

from tandem.backends.description import register_backend
from tandem.protocol.worker import TrainingSpec


@register_backend(
    "fsdp2",
    implementation="trainer_service.backends.fsdp2:Fsdp2Backend",
    capabilities=("adapters", "layouts", "sleep"),
)
class Fsdp2Training(TrainingSpec):
    """A run's trained parameters, which the SDK and `tandem.` metadata choose."""
