"""Client library for reinforcement learning on the public `tinker` SDK. docs/loop.md says how.

`train` is the loop, and docs/design/loop.md explains its parts. The functions for advantages and
selection know no server, and their results go into `tinker.types.Datum`. To add an estimator, write
a function with its formula and paper in `advantages`."""

from tandem.rl.advantages import batch_std, dr_grpo, grpo, maxrl, reward, rloo
from tandem.rl.config import RLConfig
from tandem.rl.evaluation import Evaluation
from tandem.rl.loop import train, train_async
from tandem.rl.objectives import OBJECTIVES, Reference, objective
from tandem.rl.policy import resumable
from tandem.rl.preferences import DPOConfig, Judgement, KTOConfig, Preference, dpo, kto
from tandem.rl.report import LoopResult
from tandem.rl.returns import gae, reinforce_plus_plus, returns_to_go, whitened
from tandem.rl.rewards import RewardFailed, RewardPool
from tandem.rl.rollouts import Example
from tandem.rl.selection import dynamic_sampling, overlong_mask, soft_overlong
from tandem.rl.sft import sft
from tandem.rl.staleness import staleness
from tandem.rl.supervised import SFTConfig

__all__ = [
    "OBJECTIVES",
    "DPOConfig",
    "Evaluation",
    "Example",
    "Judgement",
    "KTOConfig",
    "LoopResult",
    "Preference",
    "RLConfig",
    "Reference",
    "RewardFailed",
    "RewardPool",
    "SFTConfig",
    "batch_std",
    "dpo",
    "dr_grpo",
    "dynamic_sampling",
    "gae",
    "grpo",
    "kto",
    "maxrl",
    "objective",
    "overlong_mask",
    "reinforce_plus_plus",
    "resumable",
    "returns_to_go",
    "reward",
    "rloo",
    "sft",
    "soft_overlong",
    "staleness",
    "train",
    "train_async",
    "whitened",
]
