"""An environment, and the rollout of one episode in it."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Protocol, Unpack

from tandem.rl.environments.chat import Renderer
from tandem.rl.rollouts import Example, Prompt, Rollout, SampleSettings, Stop, Turn

_CLOSE_SECONDS = 60.0


@dataclasses.dataclass(frozen=True)
class Step:
    """The environment's reply to an answer. Without an observation the episode is over. `fields`
    are shown beside the rollout in the record."""

    reward: float
    observation: Prompt | None = None
    fields: Mapping[str, object] = dataclasses.field(default_factory=dict)


class Environment(Protocol):
    """One episode. It may also have `schemas`, which the chat template shows to the model: a
    sequence of OpenAI's `{"type": "function", "function": {...}}`. A method `async close()` is
    called at the end, also after an error. After a minute it is cancelled."""

    async def reset(self, example: Example) -> Prompt:
        """Return the first prompt."""
        ...

    async def step(self, answer: str) -> Step: ...


class SampleFunction(Protocol):
    """`Policy.sample`: it returns `n` turns whose `observation` is `prompt`."""

    def __call__(
        self, prompt: Sequence[int], **settings: Unpack[SampleSettings]
    ) -> Awaitable[Sequence[Turn]]: ...


async def rollout(
    environment: Environment,
    example: Example,
    *,
    sample: SampleFunction,
    renderer: Renderer,
    max_tokens: int,
    max_turns: int = 32,
    temperature: float = 1.0,
    seed: int | None = None,
    stop: Stop = None,
) -> Rollout:
    """Run one episode, close it, and return its turns with the sum of its rewards.

    The prompt of a turn is the previous prompt, the sampled tokens, and the tokens of the new
    observation. No token is rendered or tokenised again. `max_tokens` bounds an answer. The field
    `ended` is "done" or "max_turns"."""
    prompt: list[int] = []
    turns: list[Turn] = []
    fields: dict[str, object] = {}
    reward, text, ended = 0.0, "", "max_turns"
    async with AsyncExitStack() as stack:
        if close := getattr(environment, "close", None):
            stack.push_async_callback(_close_in_time, close)
        first = await environment.reset(example)
        observation = renderer.prompt(first, tools=getattr(environment, "schemas", ()))
        while len(turns) < max_turns:
            prompt += observation
            [answer] = await sample(
                tuple(prompt),
                n=1,
                max_tokens=max_tokens,
                temperature=temperature,
                seed=_seed_of_turn(seed, len(turns)),
                stop=stop,
            )
            turns.append(dataclasses.replace(answer, observation=tuple(observation)))
            prompt += answer.tokens
            text = renderer.text(answer)
            step = await environment.step(text)
            reward += step.reward
            fields |= step.fields
            if step.observation is None:
                ended = "done"
                break
            observation = renderer.follow(answer, step.observation)
    fields |= {"turns": len(turns), "ended": ended}
    return Rollout(turns=tuple(turns), reward=reward, text=text, fields=fields)


async def _close_in_time(close: Callable[[], Awaitable[None]]) -> None:
    """The end of an episode that was cancelled has no other deadline."""
    try:
        async with asyncio.timeout(_CLOSE_SECONDS) as limit:
            await close()
    except TimeoutError:
        if not limit.expired():
            raise


def _seed_of_turn(seed: int | None, turn: int) -> int | None:
    """Equal prompts of different turns get different samples."""
    return None if seed is None else (seed + 1_000_003 * turn) % 2**31
