"""The settings of loops."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from tinker import types

RewardFailure = Literal["drop", "error", "zero"]


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """The settings that all loops share.

    The learning rate rises linearly in `warmup_steps` steps. Then it falls linearly to its share
    `final_learning_rate` in the last step. `betas` are those of Adam.
    `evaluate_every` and `save_every` are in steps. With 0, only the last step counts. `out` is a
    folder for the state: a loop with the same folder continues. `name`, `tags` and all settings go
    to the run's record."""

    learning_rate: float
    final_learning_rate: float = 1.0
    warmup_steps: int = 0
    betas: tuple[float, float] = (0.9, 0.95)
    grad_clip_norm: float = 0.0
    evaluate_every: int = 0
    save_every: int = 0
    seed: int = 0
    shuffle: bool = True
    out: Path | None = None
    name: str = ""
    tags: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.save_every and self.out is None:
            raise ValueError("save_every needs `out`, a folder for the state of the loop")

    def rate_of(self, step: int, *, last: int) -> float:
        """Return the learning rate of a step 1, 2, …, `last`."""
        warmup = self.warmup_steps
        if step <= warmup:
            return self.learning_rate * step / (warmup + 1)
        through = (step - 1 - warmup) / max(last - 1 - warmup, 1)
        return self.learning_rate * (1 - through * (1 - self.final_learning_rate))

    def adam_of(self, step: int, *, last: int) -> types.AdamParams:
        """Return the optimizer's settings of a step 1, 2, …, `last`."""
        from tinker import types

        beta1, beta2 = self.betas
        return types.AdamParams(
            learning_rate=self.rate_of(step, last=last),
            beta1=beta1,
            beta2=beta2,
            grad_clip_norm=self.grad_clip_norm,
        )

    def is_due(self, every: int, *, step: int, last: int) -> bool:
        """Whether a step is the last one, or a multiple of `every`."""
        return step == last or (every > 0 and step % every == 0)

    def to_record(self, **more: object) -> dict[str, object]:
        """Return the settings for the run's record, after `more`."""
        found = {key: value for key, value in asdict(self).items() if key not in ("name", "tags")}
        found["out"] = None if self.out is None else str(self.out)
        return {**more, **found}

    def _check_counts(self, *names: str) -> None:
        for name in names:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; at least 1 is needed")


@dataclass(frozen=True, kw_only=True)
class RLConfig(LoopConfig):
    """Settings of `tandem.rl.train`. Times are in seconds.

    `steps` batches, each of `groups_per_step` examples with `group_size` rollouts. A batch makes
    `substeps` optimizer steps, each with a part of its rollouts, and does so `epochs` times.
    `objective` names an entry of `tandem.rl.objectives.OBJECTIVES`, and `objective_options` are its
    settings. `off_by` 0 is the synchronous loop. With k, a trained token is at most k batches old.
    `in_flight` continues running answers with new weights. `max_concurrency` bounds rollouts under
    way. `reward_failure` says what a failed reward means."""

    steps: int
    groups_per_step: int
    group_size: int
    max_tokens: int
    temperature: float = 1.0
    stop: tuple[str, ...] | tuple[int, ...] | None = None
    objective: str = "grpo"
    objective_options: Mapping[str, float | str | bool] = field(default_factory=dict)
    substeps: int = 1
    epochs: int = 1
    kl_coefficient: float = 0.0
    off_by: int = 0
    in_flight: bool = False
    max_concurrency: int = 1024
    reward_processes: int = 2
    reward_timeout: float = 60.0
    reward_failure: RewardFailure = "drop"
    rollout_timeout: float = 1800.0
    sync_timeout: float = 600.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_counts("steps", "groups_per_step", "group_size")
        self._check_counts("max_tokens", "substeps", "epochs", "max_concurrency")
        rollouts = self.groups_per_step * self.group_size
        if self.substeps > rollouts:
            raise ValueError(
                f"substeps is {self.substeps}; each needs a rollout, and a step has {rollouts}"
            )
        if self.off_by < 0:
            raise ValueError(f"off_by is {self.off_by}; 0 is synchronous, k > 0 asynchronous")
        if self.in_flight and not self.off_by:
            raise ValueError("in_flight needs off_by > 0: a synchronous loop has nothing running")
        if self.reward_failure not in ("drop", "error", "zero"):
            raise ValueError(f"reward_failure is {self.reward_failure!r}; use drop, error or zero")
