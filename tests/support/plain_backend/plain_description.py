"""The description of the backend `plain`, which gateways and agents import without torch."""

from tandem.backends import register_backend
from tandem.protocol.worker import TrainingSpec


@register_backend("plain", implementation="plain_backend:PlainBackend", capabilities=())
class PlainTraining(TrainingSpec):
    pass
