"""Evaluations in the background, each with the weights of one step."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from tandem.errors import describe
from tandem.rl.collector import Collector
from tandem.rl.concurrency import Concurrency
from tandem.rl.config import RLConfig
from tandem.rl.policy import RolloutSampler
from tandem.rl.rewards import RewardFailed
from tandem.rl.rollouts import Example, Group
from tandem.rl.tasks import all_of

_CONCURRENCY = 64
"""Rollouts at a time. The training uses the same engines."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Examples on which a loop measures its policy, with `samples` answers to each.

    The seeds do not depend on the step, so that steps are comparable. `max_tokens` is by default
    the loop's. After `timeout` seconds an evaluation has failed, and the loop goes on."""

    dataset: Sequence[Example]
    samples: int = 1
    temperature: float = 0.0
    max_tokens: int | None = None
    timeout: float = 3600.0

    def __post_init__(self) -> None:
        if not len(self.dataset) or self.samples < 1:
            raise ValueError("an evaluation needs examples and at least one sample of each")


@dataclass(frozen=True, kw_only=True)
class Score:
    """The mean `reward` of `rollouts` with the weights of `policy_step`. Failed rollouts do not
    count. `failure` says why there is no score."""

    step: int
    policy_step: int
    reward: float
    rollouts: int
    failure: str = ""


class Evaluations:
    """Runs evaluations one after another. `note` gets each score."""

    def __init__(
        self,
        evaluation: Evaluation,
        collector: Collector,
        *,
        config: RLConfig,
        tasks: asyncio.TaskGroup,
        note: Callable[[Score], None],
    ) -> None:
        self._evaluation = evaluation
        self._collector = collector.with_config(
            replace(
                config,
                group_size=evaluation.samples,
                substeps=1,
                temperature=evaluation.temperature,
                max_tokens=evaluation.max_tokens or config.max_tokens,
            ),
            Concurrency(_CONCURRENCY),
        )
        self._tasks = tasks
        self._note = note
        self._turn = asyncio.Lock()
        self._running: set[asyncio.Task[None]] = set()

    def evaluate_later(
        self, step: int, snapshot: Awaitable[RolloutSampler], *, policy_step: int
    ) -> None:
        # Nobody else's wait for the snapshot ends with the evaluation's.
        kept = asyncio.shield(asyncio.ensure_future(snapshot))
        task = self._tasks.create_task(self._evaluate(step, kept, policy_step))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def finish(self) -> None:
        """Wait for the started evaluations."""
        if self._running:
            await asyncio.wait(self._running)

    async def _evaluate(
        self, step: int, snapshot: Awaitable[RolloutSampler], policy_step: int
    ) -> None:
        rewards: list[float] = []
        async with self._turn:
            try:
                async with asyncio.timeout(self._evaluation.timeout) as limit:
                    groups = await evaluate(self._evaluation, self._collector, await snapshot)
                rewards = [reward for group in groups for reward in group.rewards]
                failure = "" if rewards else self._collector.last_failure
            except RewardFailed:
                raise
            except Exception as error:  # noqa: BLE001 - the training does not need a score
                if isinstance(error, TimeoutError) and limit.expired():
                    failure = f"it took longer than {self._evaluation.timeout:g} s"
                else:
                    failure = describe(error, typed=True)
        self._note(
            Score(
                step=step,
                policy_step=policy_step,
                reward=fmean(rewards) if rewards else math.nan,
                rollouts=len(rewards),
                failure=failure,
            )
        )


async def evaluate(
    evaluation: Evaluation, collector: Collector, sampler: RolloutSampler
) -> list[Group]:
    """Return the groups of all examples. The answers only depend on the sampler's weights."""
    return await all_of(
        [
            collector.group(number, example, 0, sampler)
            for number, example in enumerate(evaluation.dataset)
        ]
    )
