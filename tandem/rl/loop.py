"""The loop: sample, score, train, publish, repeat.

`_Loop.train_to_end` is the whole of it. The producer samples ahead in a bounded number of places.
So a synchronous and an asynchronous loop differ in this number and in one wait."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np

from tandem.rl.collector import Collector, MakeEnvironment, open_rewards
from tandem.rl.concurrency import Concurrency
from tandem.rl.config import RLConfig
from tandem.rl.environments import Renderer
from tandem.rl.evaluation import Evaluation, Evaluations, Score
from tandem.rl.objectives import Objective, Reference, objective
from tandem.rl.policy import Policy, TinkerPolicy, Training, open_policy
from tandem.rl.producer import ExampleOrder, Producer
from tandem.rl.report import LoopResult, StepReport, Tracked, record, report_of
from tandem.rl.rewards import Reward, RewardPool
from tandem.rl.rollouts import Example, Group
from tandem.rl.state import LoopState
from tandem.rl.tasks import blocking, first_error

if TYPE_CHECKING:
    from tinker import types

Value = TypeVar("Value")

_AHEAD = 2
"""Optimizer steps in flight, so that the trainer has no pause between them."""

_REFILLS = 10
"""How many batches a step may sample for groups with a signal. Then it takes the others, too."""


async def train_async(
    training: Training,
    dataset: Sequence[Example],
    reward_or_environment: Reward | MakeEnvironment,
    config: RLConfig,
    *,
    tokenizer: Any = None,
    evaluation: Evaluation | None = None,
    tracked: Tracked | Literal[False] | None = None,
    reference: Reference | None = None,
    on_step: Callable[[StepReport], None] | None = None,
) -> LoopResult:
    """Train a policy with rewards of its own rollouts. docs/loop.md has examples.

    `training` is a training client, or a function that makes one from a saved state's path, such as
    `resumable(service, model)`. Only with a function does a loop continue from `config.out`.
    `reward_or_environment` is a function of an example and an answer, or an environment's class.
    `tokenizer` is by default the client's. `evaluation` runs in the background. Without `tracked`,
    a Tandem gateway records the run, and False records nothing. `reference` is the frozen policy of
    a KL, or a teacher. `on_step` gets the report of each step, and the loop waits for it. Ctrl-C
    ends all rollouts."""
    chosen = objective(
        config.objective,
        max_tokens=config.max_tokens,
        kl_coefficient=config.kl_coefficient,
        **config.objective_options,
    )
    if chosen.needs_reference and reference is None:
        raise ValueError(f"{chosen.name} with a KL or a teacher needs train(…, reference=…)")
    chosen.check_group_size(config.group_size)
    order = ExampleOrder(dataset, seed=config.seed, shuffle=config.shuffle)
    state = LoopState.of_folder(config.out, seed=config.seed, examples=len(dataset))
    policy = await open_policy(
        training, path=state.path, step=state.policy_step, in_flight=config.in_flight
    )
    async with AsyncExitStack() as stack:
        rewards = await stack.enter_async_context(open_rewards(reward_or_environment, config))
        if isinstance(policy, TinkerPolicy):
            tokenizer = tokenizer or await asyncio.to_thread(policy.training.get_tokenizer)
            if tracked is None:
                about = config.to_record(total_steps=config.steps)
                run = await policy.track(name=config.name, tags=config.tags, config=about)
                if run is not None:
                    tracked = run
                    stack.push_async_callback(asyncio.to_thread, run.finish)
        try:
            async with asyncio.TaskGroup() as tasks:
                return await _Loop(
                    policy,
                    config,
                    tasks=tasks,
                    order=order,
                    state=state,
                    objective=chosen,
                    rewards=rewards,
                    renderer=Renderer(tokenizer),
                    evaluation=evaluation,
                    tracked=tracked or None,
                    reference=reference,
                    on_step=on_step,
                ).train_to_end()
        except BaseExceptionGroup as errors:
            raise first_error(errors) from None


train = blocking(train_async)


class _Loop:
    def __init__(
        self,
        policy: Policy,
        config: RLConfig,
        *,
        tasks: asyncio.TaskGroup,
        order: ExampleOrder,
        state: LoopState,
        objective: Objective,
        rewards: RewardPool | MakeEnvironment,
        renderer: Renderer,
        evaluation: Evaluation | None,
        tracked: Tracked | None,
        reference: Reference | None,
        on_step: Callable[[StepReport], None] | None,
    ) -> None:
        self._policy, self._config, self._state, self._tasks = policy, config, state, tasks
        self._objective, self._reference = objective, reference
        self._tracked, self._renderer, self._on_step = tracked, renderer, on_step
        self._concurrency = Concurrency(config.max_concurrency)
        self._collector = Collector(config, rewards, renderer, self._concurrency)
        self._producer = Producer(
            order,
            partial(self._collector.group, sampler=policy),
            tasks=tasks,
            places=(config.off_by + 1) * config.groups_per_step,
            needed=min(config.group_size, 2),
            cursor=state.cursor,
            under_way=state.under_way,
            describe_failure=lambda: self._collector.last_failure,
        )
        self._evaluations: Evaluations | None = None
        if evaluation is not None:
            self._evaluations = Evaluations(
                evaluation, self._collector, config=config, tasks=tasks, note=self._note_score
            )
        self._failed_rewards = rewards.failures if isinstance(rewards, RewardPool) else {}
        self._dropped_before = Counter(state.dropped)
        self._step, self._trained_at = state.step, state.policy_step
        self._reports: list[StepReport] = []
        self._scores: list[Score] = []
        self._seconds: dict[str, float] = {}

    async def train_to_end(self) -> LoopResult:
        config, producer = self._config, self._producer
        following = self._tasks.create_task(self._concurrency.follow(self._policy))
        if self._step < config.steps:
            self._start_evaluation()
            await self._publish(0)  # a continued loop, too, samples from its own weights
        publishing: asyncio.Task[None] | None = None
        while self._step < config.steps:
            batch = await self._timed("waiting", self._batch())
            metrics = await self._timed("training", self._train(batch))
            self._step += 1
            producer.finish(batch)
            self._report(batch, metrics)
            if config.out is not None and self._is_due(config.save_every):
                await self._save(config.out)
            self._start_evaluation()
            if publishing is not None:
                await publishing
            if self._step < config.steps:
                publishing = self._tasks.create_task(self._publish(len(batch)))
                await asyncio.sleep(0)  # its request is sent before the next gradients
                if not config.off_by:
                    await publishing
        producer.cancel()
        if self._evaluations is not None:
            await self._evaluations.finish()
        following.cancel()
        return LoopResult(
            policy=self._policy,
            step=self._step,
            steps=self._reports,
            evaluations=self._scores,
            dropped=dict(self._dropped()),
            path=self._state.path,
        )

    async def _publish(self, trained: int) -> None:
        """Sync the samplers. Then the places of the trained groups are free for new ones."""
        await self._timed("sync", self._policy.sync(self._config.sync_timeout))
        self._producer.most = (self._config.steps - self._step) * self._config.groups_per_step
        self._producer.free(trained)

    async def _batch(self) -> list[Group]:
        """Wait for the groups of a step: young enough, and with a signal."""
        producer, count = self._producer, self._config.groups_per_step
        batch: list[Group] = []
        refilled = 0
        while len(batch) < count:
            taken = await self._policy.resolve(await producer.take(count - len(batch)))
            fresh = [group for group in taken if not self._is_stale(group)]
            kept, flat = self._objective.select(fresh)
            refilled += len(flat)
            if refilled > _REFILLS * count:
                kept, flat = fresh, []
            producer.dropped["no_signal"] += len(flat)
            producer.finish(flat)
            producer.free(len(flat))
            batch += kept
        return sorted(batch, key=lambda group: group.number)

    def _is_stale(self, group: Group) -> bool:
        """Whether a group is too old. Then its example is drawn again."""
        updates = self._config.substeps * self._config.epochs
        oldest = self._policy.step - self._config.off_by * updates
        if group.oldest_step >= oldest:
            return False
        self._producer.dropped["stale"] += 1
        self._producer.draw_again(group)
        return True

    async def _train(self, batch: list[Group]) -> dict[str, float]:
        """Make the optimizer steps of a batch. Returns the metrics of the last one."""
        config, policy, chosen = self._config, self._policy, self._objective
        adam = config.adam_of(self._step + 1, last=config.steps)
        data: dict[int, list[types.Datum]] = {}
        pending: deque[asyncio.Task[Mapping[str, float]]] = deque()
        self._trained_at = policy.step
        parts = min(config.substeps, sum(len(group.rollouts) for group in batch))
        for part in self._parts(parts):
            if part not in data:
                data[part] = await chosen.data(
                    batch, reference=self._reference, part=part, parts=parts
                )
            if len(pending) == _AHEAD:
                await pending.popleft()
            update = policy.train(data[part], chosen.loss, chosen.settings, adam)
            pending.append(self._tasks.create_task(update))
            await asyncio.sleep(0)  # its requests are sent before later ones
        return dict([await each for each in pending][-1])

    def _parts(self, count: int) -> list[int]:
        """Return the parts of a batch in the order of their optimizer steps: as they are, then in a
        random order for each further epoch."""
        parts = list(range(count))
        for epoch in range(1, self._config.epochs):
            random = np.random.default_rng((self._config.seed, self._step, epoch))
            parts += random.permutation(count).tolist()
        return parts

    async def _save(self, out: Path) -> None:
        """Save the trainer, then the state that belongs to it."""
        cursor, under_way = self._producer.cursor, tuple(self._producer.under_way)
        path = await self._policy.save(f"step-{self._step:06d}")
        self._state = replace(
            self._state,
            step=self._step,
            policy_step=self._policy.step,
            cursor=cursor,
            under_way=under_way,
            path=path,
            dropped=dict(self._dropped()),
        )
        await asyncio.to_thread(self._state.write_to, out)

    def _start_evaluation(self) -> None:
        """Evaluate the present weights. The snapshot is asked for before the next gradients."""
        if self._evaluations is not None and self._is_due(self._config.evaluate_every):
            policy = self._policy
            self._evaluations.evaluate_later(self._step, policy.snapshot(), policy_step=policy.step)

    def _is_due(self, every: int) -> bool:
        return self._config.is_due(every, step=self._step, last=self._config.steps)

    def _report(self, batch: list[Group], metrics: dict[str, float]) -> None:
        report = report_of(
            batch,
            step=self._step,
            policy_step=self._trained_at,
            dropped=self._dropped(),
            metrics=metrics,
            seconds={**self._seconds, "sampling": self._producer.take_sampling_seconds()},
        )
        self._reports.append(report)
        if self._tracked is not None:
            failed = {f"failed_rewards/{name}": n for name, n in self._failed_rewards.items()}
            self._tracked.log(self._step, {**report.values(), **failed})
            # In a thread: to encode thousands of rollouts takes seconds.
            recorded = asyncio.to_thread(record, self._tracked, self._step, batch, self._renderer)
            self._tasks.create_task(recorded)
        if self._on_step is not None:
            self._on_step(report)

    def _note_score(self, score: Score) -> None:
        self._scores.append(score)
        if self._tracked is not None and not score.failure:
            self._tracked.log(score.step, {"evaluation/reward": score.reward})

    def _dropped(self) -> Counter[str]:
        return self._dropped_before + self._producer.dropped + self._collector.dropped

    async def _timed(self, name: str, wait: Awaitable[Value]) -> Value:
        clock = asyncio.get_running_loop().time
        started = clock()
        found = await wait
        self._seconds[name] = clock() - started
        return found
