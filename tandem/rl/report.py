"""The numbers and the rollouts of a step, for the caller and for the run's record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Protocol

from tandem.rl.environments import Renderer
from tandem.rl.evaluation import Score
from tandem.rl.policy import Policy
from tandem.rl.rollouts import Group

_TIMES = ("sampling", "waiting", "training", "sync")


class Tracked(Protocol):
    """The part of a `tandem.track` object that a loop uses."""

    def log(self, step: int, values: Mapping[str, Any]) -> None: ...

    def rollouts(self, step: int, rollouts: Sequence[Mapping[str, Any]]) -> None: ...


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """Step `step`, 1 and on. `reward` is the mean of its `rollouts`.

    `staleness` is the mean age of the sampled `tokens`, and `oldest` the largest one, in optimizer
    steps. `dropped` counts groups and rollouts by reason since the start of the run. `metrics` are
    the server's, of the last optimizer step. `seconds` are the loop's waits for the batch
    (`waiting`), for the trainer (`training`) and for the publication before (`sync`), and the mean
    time of a group (`sampling`)."""

    step: int
    reward: float
    rollouts: int
    tokens: int
    staleness: float
    oldest: int
    dropped: Mapping[str, int]
    metrics: Mapping[str, float]
    seconds: Mapping[str, float] = field(default_factory=dict)

    def values(self) -> dict[str, float]:
        """Return the numbers for the run's record. The server records its metrics itself."""
        return {
            "reward": self.reward,
            "rollouts": self.rollouts,
            "tokens": self.tokens,
            "staleness": self.staleness,
            **{f"dropped/{reason}": count for reason, count in self.dropped.items()},
            **{f"seconds_{name}": self.seconds[name] for name in _TIMES if name in self.seconds},
        }


@dataclass(frozen=True, kw_only=True)
class LoopResult:
    """The trained `policy` after `step` steps. `steps` and `evaluations` are those of this call,
    and `dropped` counts groups and rollouts by reason. `path` is the newest saved state."""

    policy: Policy
    step: int
    steps: list[StepReport] = field(default_factory=list)
    evaluations: list[Score] = field(default_factory=list)
    dropped: dict[str, int] = field(default_factory=dict)
    path: str | None = None


def report_of(
    batch: Sequence[Group],
    *,
    step: int,
    policy_step: int,
    dropped: Mapping[str, int],
    metrics: Mapping[str, float],
    seconds: Mapping[str, float],
) -> StepReport:
    """Describe a batch that was trained on weights of `policy_step` optimizer steps."""
    rollouts = [rollout for group in batch for rollout in group.rollouts]
    steps = [turn.steps for rollout in rollouts for turn in rollout.turns if len(turn.steps)]
    tokens = sum(map(len, steps))
    return StepReport(
        step=step,
        reward=fmean(rollout.reward for rollout in rollouts),
        rollouts=len(rollouts),
        tokens=tokens,
        staleness=policy_step - sum(map(sum, steps)) / tokens if tokens else 0.0,
        oldest=policy_step - min(map(min, steps), default=policy_step),
        dropped=dict(dropped),
        metrics=dict(metrics),
        seconds=dict(seconds),
    )


def record(tracked: Tracked, step: int, batch: Sequence[Group], renderer: Renderer) -> None:
    """Write the rollouts of a step to the run's record."""
    rows = [
        {
            **rollout.fields,
            "prompt": renderer.decode(rollout.turns[0].observation) if rollout.turns else "",
            "answer": rollout.text,
            "reward": rollout.reward,
            "example": group.number,
            "tokens": [token for turn in rollout.turns for token in turn.tokens],
            "logprobs": [value for turn in rollout.turns for value in turn.logprobs],
        }
        for group in batch
        for rollout in group.rollouts
    ]
    tracked.rollouts(step, rows)
