"""Custom losses as data: the allow-list of operations, the checked graph and its reader.

Nothing here needs torch, so that the gateway can refuse a loss as soon as it is created.
"""

from tandem.custom_loss.check import MAX_BYTES, read_custom_loss
from tandem.custom_loss.graph import Graph

__all__ = ["MAX_BYTES", "Graph", "read_custom_loss"]
