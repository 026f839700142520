"""From an example to its group: sample rollouts, score them, and leave out the failed ones."""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from hashlib import blake2b
from typing import Any, TypeAlias, TypeGuard, TypeVar, cast

from tandem.errors import describe
from tandem.rl.concurrency import Concurrency
from tandem.rl.config import RLConfig
from tandem.rl.environments import Environment, Renderer, rollout
from tandem.rl.policy import RolloutSampler
from tandem.rl.rewards import Reward, RewardFailed, RewardPool, Scorer
from tandem.rl.rollouts import Example, Group, Rollout, Turn
from tandem.rl.tasks import all_of

Result = TypeVar("Result")

MakeEnvironment: TypeAlias = Callable[[], Environment]
"""An environment's class, or a function without arguments. Each episode has its own object."""


def makes_environments(thing: Reward | MakeEnvironment) -> TypeGuard[MakeEnvironment]:
    """Whether it is called without arguments. A reward has two, the example and the answer, which
    may be `*args` behind a decorator."""
    if hasattr(getattr(thing, "func", thing), "reset"):  # a class, or a partial of one
        return True
    needed = [
        parameter
        for parameter in inspect.signature(thing).parameters.values()
        if parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
    ]
    return not needed


@asynccontextmanager
async def open_rewards(
    thing: Reward | MakeEnvironment, config: RLConfig
) -> AsyncIterator[RewardPool | MakeEnvironment]:
    """Start the processes of a reward."""
    if makes_environments(thing):
        yield thing
        return
    async with RewardPool(
        cast("Reward", thing),
        processes=config.reward_processes,
        timeout=config.reward_timeout,
        failure=config.reward_failure,
    ) as pool:
        yield pool


class Collector:
    """Samples and scores the rollouts of examples, with a reward or with environments.

    A failed rollout is absent from its group, and counted in `dropped` by reason: "timeout",
    "sample", "environment" or "reward". `last_failure` is a sentence about the newest one."""

    def __init__(
        self,
        config: RLConfig,
        rewards: Scorer | MakeEnvironment,
        renderer: Renderer,
        concurrency: Concurrency,
    ) -> None:
        self.dropped: Counter[str] = Counter()
        self.last_failure = ""
        self._config = config
        self._rewards = rewards
        self._renderer = renderer
        self._concurrency = concurrency

    def with_config(self, config: RLConfig, concurrency: Concurrency) -> Collector:
        """Return another collector with the same rewards or environments."""
        return Collector(config, self._rewards, self._renderer, concurrency)

    async def group(
        self, number: int, example: Example, attempt: int, sampler: RolloutSampler
    ) -> Group:
        """Sample and score `example`. The samples depend on the weights, the number and the
        attempt alone."""
        seeds = (self._config.seed, number, attempt)
        if callable(self._rewards):
            found = await self._episodes(self._rewards, example, seeds, sampler)
        else:
            found = await self._answers(self._rewards, example, seeds, sampler)
        rollouts = [each for each in found if each is not None]
        return Group(number=number, example=example, rollouts=rollouts)

    async def _answers(
        self, scorer: Scorer, example: Example, seeds: tuple[int, ...], sampler: RolloutSampler
    ) -> Sequence[Rollout | None]:
        config = self._config

        async def sample() -> list[Turn]:
            clock = asyncio.get_running_loop().time
            started = clock()
            turns = await sampler.sample(
                self._renderer.prompt(example.prompt),
                n=config.group_size,
                max_tokens=config.max_tokens,
                temperature=config.temperature,
                seed=sample_seed(*seeds),
                stop=config.stop,
            )
            longest = max((len(turn.tokens) for turn in turns), default=0)
            self._concurrency.note_latency(clock() - started, longest)
            return turns

        async def scored(turn: Turn) -> Rollout | None:
            text = self._renderer.text(turn)
            reward = await scorer.score(example, text)
            if reward is None:
                self._drop("reward", 1, scorer.last_failure)
                return None
            return Rollout(turns=[turn], reward=reward, text=text)

        turns = await self._attempted(sample(), config.group_size, "sample")
        return await all_of([scored(turn) for turn in turns or ()])

    async def _episodes(
        self,
        make: MakeEnvironment,
        example: Example,
        seeds: tuple[int, ...],
        sampler: RolloutSampler,
    ) -> Sequence[Rollout | None]:
        config = self._config

        async def episode(index: int) -> Rollout:
            return await rollout(
                make(),
                example,
                sample=sampler.sample,
                renderer=self._renderer,
                max_tokens=config.max_tokens,
                temperature=config.temperature,
                seed=sample_seed(*seeds, index),
                stop=config.stop,
            )

        return await all_of(
            [
                self._attempted(episode(index), 1, "environment")
                for index in range(config.group_size)
            ]
        )

    async def _attempted(
        self, wait: Coroutine[Any, Any, Result], count: int, reason: str
    ) -> Result | None:
        """Await `count` rollouts in their turn and within their time. Returns None for failed
        ones."""
        try:
            async with self._concurrency.rollouts(count):
                async with asyncio.timeout(self._config.rollout_timeout) as limit:
                    return await wait
        except RewardFailed:
            raise
        except Exception as error:  # noqa: BLE001 - it costs only these rollouts
            if isinstance(error, TimeoutError) and limit.expired():
                seconds = self._config.rollout_timeout
                late = f"a rollout took longer than {seconds:g} s (rollout_timeout)"
                self._drop("timeout", count, late)
            else:
                self._drop(reason, count, describe(error, typed=True))
        finally:
            wait.close()
        return None

    def _drop(self, reason: str, count: int, sentence: str) -> None:
        self.dropped[reason] += count
        self.last_failure = sentence


def sample_seed(*numbers: int) -> int:
    """Return a seed, 0 to 2³¹ - 1, that depends on all numbers."""
    text = ":".join(map(str, numbers)).encode()
    return int.from_bytes(blake2b(text, digest_size=4).digest()) >> 1
