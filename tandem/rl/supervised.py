"""The loop over a fixed dataset, for supervised fine-tuning and for preferences.

It trains batches in an order of the seed, evaluates, saves, and continues from `out`."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from tandem.rl.config import LoopConfig
from tandem.rl.policy import TinkerPolicy, Training, open_policy
from tandem.rl.report import Tracked
from tandem.rl.state import LoopState

if TYPE_CHECKING:
    from tinker import types

_AHEAD = 2
"""Steps in flight, so that the trainer has no pause between them."""


@dataclass(frozen=True, kw_only=True)
class SFTConfig(LoopConfig):
    """Settings of `sft`. Those of `dpo` and `kto` have more.

    `epochs` passes over the dataset in steps of `batch_size` rows, in another order each."""

    batch_size: int
    epochs: int = 1
    final_learning_rate: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_counts("batch_size", "epochs")

    def steps(self, rows: int) -> int:
        return self.epochs * -(-rows // self.batch_size)

    def rows_of(self, step: int, rows: int) -> list[int]:
        """Return the rows of a step 0, 1, …: each row once in an epoch."""
        epoch, place = divmod(step, -(-rows // self.batch_size))
        order = np.arange(rows)
        if self.shuffle:
            order = np.random.default_rng((self.seed, epoch)).permutation(rows)
        found: list[int] = order[place * self.batch_size : (place + 1) * self.batch_size].tolist()
        return found


class Task(Protocol):
    """Rows of a dataset as batches for a loss of the server. `settings` are the loss's."""

    loss: str
    settings: Mapping[str, float | str]

    def __len__(self) -> int: ...

    async def data(self, rows: Sequence[int]) -> list[types.Datum]: ...

    def values(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the numbers to show, from the server's metrics of one request."""
        ...


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """The trained `policy` after `step` steps. `steps` has the numbers of each step of this call,
    and `evaluations` those of each evaluation, by step. `path` is the newest saved state."""

    policy: TinkerPolicy
    step: int
    steps: list[dict[str, float]] = field(default_factory=list)
    evaluations: dict[int, dict[str, float]] = field(default_factory=dict)
    path: str | None = None


async def open_client(
    training: Training, config: SFTConfig, *, rows: int
) -> tuple[TinkerPolicy, LoopState]:
    """Return the policy at its saved state, and that state. Raises `ValueError` if `training` is
    neither a training client nor a function that makes one, or for an empty dataset."""
    if not rows:
        raise ValueError("the dataset is empty")
    state = LoopState.of_folder(config.out, seed=config.seed, examples=rows)
    policy = await open_policy(training, path=state.path, step=state.policy_step, in_flight=False)
    if not isinstance(policy, TinkerPolicy):
        raise ValueError("training must be a training client, or a function that makes one")
    return policy, state


async def fit(
    policy: TinkerPolicy,
    task: Task,
    config: SFTConfig,
    *,
    state: LoopState,
    evaluation: Task | None = None,
    tracked: Tracked | Literal[False] | None = None,
) -> Fitted:
    """Train a task from `state` on, step by step."""
    async with AsyncExitStack() as stack:
        if tracked is None:
            rows = len(task)
            about = config.to_record(total_steps=config.steps(rows), rows=rows)
            run = await policy.track(name=config.name, tags=config.tags, config=about)
            if run is not None:
                tracked = run
                stack.push_async_callback(asyncio.to_thread, run.finish)
        return await _Fit(policy, task, config, state, evaluation, tracked or None).fit_to_end()


class _Fit:
    def __init__(
        self,
        policy: TinkerPolicy,
        task: Task,
        config: SFTConfig,
        state: LoopState,
        evaluation: Task | None,
        tracked: Tracked | None,
    ) -> None:
        self._policy, self._task, self._config, self._state = policy, task, config, state
        self._evaluation, self._tracked = evaluation, tracked
        self._total = config.steps(len(task))
        self._steps: list[dict[str, float]] = []
        self._evaluations: dict[int, dict[str, float]] = {}
        self._pending: deque[tuple[int, asyncio.Task[Mapping[str, float]]]] = deque()

    async def fit_to_end(self) -> Fitted:
        try:
            for step in range(self._state.step + 1, self._total + 1):
                await self._start(step)
                if len(self._pending) >= _AHEAD:
                    await self._finish_one()
                if self._evaluation is not None and self._due(step, self._config.evaluate_every):
                    await self._evaluate(step, self._evaluation)
                if self._config.out is not None and self._due(step, self._config.save_every):
                    await self._save(step, self._config.out)
            await self._finish_all()
        finally:
            for _step, task in self._pending:
                task.cancel()
        return Fitted(
            policy=self._policy,
            step=max(self._total, self._state.step),
            steps=self._steps,
            evaluations=self._evaluations,
            path=self._state.path,
        )

    async def _start(self, step: int) -> None:
        config = self._config
        data = await self._task.data(config.rows_of(step - 1, len(self._task)))
        adam = config.adam_of(step, last=self._total)
        task = asyncio.create_task(
            self._policy.train(data, self._task.loss, self._task.settings, adam)
        )
        self._pending.append((step, task))
        await asyncio.sleep(0)  # its requests are sent before later ones

    async def _finish_one(self) -> None:
        step, task = self._pending[0]
        values = self._task.values(await task)
        self._pending.popleft()
        self._steps.append(values)
        if self._tracked is not None:
            self._tracked.log(step, values)

    async def _finish_all(self) -> None:
        while self._pending:
            await self._finish_one()

    def _due(self, step: int, every: int) -> bool:
        return self._config.is_due(every, step=step, last=self._total)

    async def _evaluate(self, step: int, task: Task) -> None:
        """The request follows the step's, so it sees the weights after the step."""
        await self._finish_all()
        rows = len(task)
        found: list[tuple[int, dict[str, float]]] = []
        for first in range(0, rows, self._config.batch_size):
            chosen = range(first, min(first + self._config.batch_size, rows))
            data = await task.data(chosen)
            computed = self._policy.training.forward(data, task.loss, dict(task.settings) or None)
            found.append((len(chosen), task.values((await computed).metrics)))
        values = {
            name: sum(count * each[name] for count, each in found) / rows for name in found[0][1]
        }
        self._evaluations[step] = values
        if self._tracked is not None:
            self._tracked.log(step, {f"evaluation/{name}": each for name, each in values.items()})

    async def _save(self, step: int, out: Path) -> None:
        await self._finish_all()
        path = await self._policy.save(f"step-{step:06d}")
        self._state = LoopState(
            step=step,
            policy_step=self._policy.step,
            cursor=step * self._config.batch_size,
            path=path,
            seed=self._state.seed,
            examples=self._state.examples,
        )
        await asyncio.to_thread(self._state.write_to, out)


async def tokenizer_of(policy: TinkerPolicy, tokenizer: Any) -> Any:
    """Return the given tokenizer, or the client's."""
    if tokenizer is not None:
        return tokenizer
    return await asyncio.to_thread(policy.training.get_tokenizer)
