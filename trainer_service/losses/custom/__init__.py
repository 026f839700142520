"""The loss "custom": made for one request from the graph that the client traced.

`tandem/custom_loss` reads and checks the graph; `table.py` has the operations, `interpreter.py`
computes them for one datum within limits, `loss.py` makes a loss of it like any other.
"""

from __future__ import annotations

from trainer_service.losses.custom.loss import custom_loss

CUSTOM = "custom"

__all__ = ["CUSTOM", "custom_loss"]
