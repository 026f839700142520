"""Client-side library for training loops: advantages, selection and schedules in numpy.

It knows no server. Its results go into `tinker.types.Datum`. To add an estimator, write a function
with its formula and paper in `advantages`, and list it in `ALGORITHMS`."""

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
from tandem.rl.staleness import staleness

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
    "staleness",
    "whitened",
]
