"""The client-side library for loops: advantages and batches, in plain Python and numpy.

It knows nothing of servers; what it returns goes into `tinker.types.Datum`.
"""

from tandem.rl.advantages import (
    ALGORITHMS,
    advantages,
    batch_std,
    dr_grpo,
    grpo,
    maxrl,
    reward,
    rloo,
)
from tandem.rl.returns import gae, reinforce_plus_plus, returns_to_go, whitened
from tandem.rl.schedule import linear_decay
from tandem.rl.selection import dynamic_sampling, overlong_mask, soft_overlong

__all__ = [
    "ALGORITHMS",
    "advantages",
    "batch_std",
    "dr_grpo",
    "dynamic_sampling",
    "gae",
    "grpo",
    "linear_decay",
    "maxrl",
    "overlong_mask",
    "reinforce_plus_plus",
    "returns_to_go",
    "reward",
    "rloo",
    "soft_overlong",
    "whitened",
]
