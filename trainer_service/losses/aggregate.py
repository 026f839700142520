"""The four ways to make one number of the losses of all tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tandem.errors import UnknownLossSetting
from trainer_service.losses.base import Setting, Settings
from trainer_service.losses.layout import Layout

if TYPE_CHECKING:
    from torch import Tensor

AGGREGATIONS = ("token_sum", "token_mean", "seq_mean_token_mean", "constant")
AGGREGATION_SETTINGS = (
    Setting("aggregation", "token_sum", "how token losses become one number", choices=AGGREGATIONS),
    Setting("max_length", 0.0, "L of the aggregation `constant`, which needs it", low=0.0),
)


def check_aggregation(settings: Settings) -> None:
    """Raises `UnknownLossSetting` for `constant` without its length."""
    if settings.text("aggregation") == "constant" and not settings.number("max_length"):
        raise UnknownLossSetting(
            "aggregation 'constant' divides by max_length: set max_length to the longest answer "
            "allowed, in tokens"
        )


def aggregate(values: Tensor, active: Tensor, settings: Settings, layout: Layout) -> Tensor:
    """One number of `values` [E], of which those that are not `active` [E] (0 or 1) do not count.

    - `token_sum`: Σ, as the Tinker protocol has it. The default.
    - `token_mean`: Σ / active tokens of the request (DAPO, arXiv 2503.14476).
    - `seq_mean_token_mean`: the mean over datums of a datum's mean (GRPO, arXiv 2402.03300). A
      datum without an active token counts as 0.
    - `constant`: Σ / (datums · `max_length`) (Dr. GRPO, arXiv 2503.20783).

    Numbers of tokens and datums are those of the request as a whole, so that the micro-batches'
    results add up to the same whatever the split.
    """
    values = values * active
    kind = settings.text("aggregation")
    if kind == "token_sum":
        return values.sum()
    if kind == "token_mean":
        return values.sum() / max(layout.totals.active, 1)
    if kind == "constant":
        return values.sum() / (layout.totals.datums * settings.number("max_length"))
    counts = layout.datum_sums(active).clamp(min=1)
    return (layout.datum_sums(values) / counts).sum() / layout.totals.datums
