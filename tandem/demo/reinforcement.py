"""The loop: sample from the newest weights, score, train, publish, repeat."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np

from tandem.demo.addition import (
    MAX_ANSWER_TOKENS,
    Problem,
    Tokenizer,
    all_problems,
    reward,
)
from tandem.demo.configuration import Reinforcement
from tandem.demo.data import ScoredAnswer, policy_datum
from tandem.rl import advantages, linear_decay
from tandem.tracking.run import TrackedRun

if TYPE_CHECKING:
    import tinker


_NOT_TRACKED = {"step", "reward_mean"}


@dataclass(frozen=True)
class StepResult:
    """One row of the table. Times are in seconds, and `loss` is per trained token.

    `staleness` is the mean number of optimizer steps between the sampling policy and the updated
    one."""

    step: int
    reward_mean: float
    loss: float
    tokens_per_second: float
    seconds_sample: float
    seconds_train: float
    seconds_sync: float
    seconds: float
    staleness: float
    learning_rate: float


class Loop:
    """Reinforcement learning on the hundred sums, with only the public SDK.

    `tracked` gets each step's metrics and rollouts."""

    def __init__(
        self,
        *,
        client: tinker.TrainingClient,
        tokenizer: Tokenizer,
        seed: int,
        configuration: Reinforcement,
        tracked: TrackedRun | None = None,
    ) -> None:
        self.tracked = tracked
        self._client = client
        self._tokenizer = tokenizer
        self._configuration = configuration
        self._seed = seed
        self._rng = random.Random(seed + 1)
        self._problems = all_problems()
        self._prompts = [tokenizer.encode(problem.prompt) for problem in self._problems]
        self.sampler: tinker.SamplingClient = client.save_weights_and_get_sampling_client().result()

    def steps(self) -> Iterator[StepResult]:
        for step in range(1, self._configuration.steps + 1):
            yield self._step(step)

    def _step(self, step: int) -> StepResult:
        configuration = self._configuration
        started = time.monotonic()
        groups = self.sample(
            samples=configuration.samples, temperature=configuration.temperature, round_=step
        )
        sampled = time.monotonic()
        rewards = np.array([[rollout.reward for rollout in group] for group in groups])
        rate = linear_decay(
            step=step,
            steps=configuration.steps,
            peak=configuration.learning_rate,
            final=configuration.final_learning_rate,
            first=configuration.first_step,
        )
        advantage = advantages(configuration.algorithm, rewards)
        self._track_rollouts(step, groups, advantage)
        loss = self._train(groups, advantage, rate)
        trained = time.monotonic()
        self.sampler = self._client.save_weights_and_get_sampling_client().result()
        ended = time.monotonic()
        tokens = sum(len(rollout.tokens) for group in groups for rollout in group)
        updates = configuration.epochs * configuration.minibatches
        result = StepResult(
            step=step,
            reward_mean=float(rewards.mean()),
            loss=loss / (tokens * configuration.epochs),
            tokens_per_second=tokens / (sampled - started),
            seconds_sample=sampled - started,
            seconds_train=trained - sampled,
            seconds_sync=ended - trained,
            seconds=ended - started,
            staleness=(updates - 1) / 2,
            learning_rate=rate,
        )
        if self.tracked is not None:
            values = {**asdict(result), "reward": result.reward_mean}
            self.tracked.log(step, {n: v for n, v in values.items() if n not in _NOT_TRACKED})
        return result

    def _track_rollouts(
        self,
        step: int,
        groups: list[list[ScoredAnswer]],
        advantage: np.ndarray[tuple[int, ...], np.dtype[np.float64]],
    ) -> None:
        if self.tracked is None:
            return
        rollouts = [
            {
                "prompt": problem.prompt,
                "answer": rollout.text,
                "expected": problem.answer,
                "reward": rollout.reward,
                "advantage": float(advantage[row, column]),
                "tokens": rollout.tokens,
                "logprobs": rollout.logprobs,
            }
            for row, (problem, group) in enumerate(zip(self._problems, groups, strict=True))
            for column, rollout in enumerate(group)
        ]
        self.tracked.rollouts(step, rollouts)

    def sample(self, *, samples: int, temperature: float, round_: int) -> list[list[ScoredAnswer]]:
        """Return `samples` answers to each problem, in the problems' order."""
        from tinker import types

        futures = [
            self.sampler.sample(
                types.ModelInput.from_ints(prompt),
                num_samples=samples,
                sampling_params=types.SamplingParams(
                    max_tokens=MAX_ANSWER_TOKENS,
                    temperature=temperature,
                    seed=(self._seed * 1_000 + round_) * 1_000 + index,
                ),
            )
            for index, prompt in enumerate(self._prompts)
        ]
        return [
            [self._rollout(problem, prompt, sequence) for sequence in future.result().sequences]
            for problem, prompt, future in zip(self._problems, self._prompts, futures, strict=True)
        ]

    def save(self, name: str) -> str:
        """Keep the newest weights. Returns their path."""
        return str(self._client.save_weights_for_sampler(name).result().path)

    def text(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens)

    def _rollout(
        self, problem: Problem, prompt: list[int], sequence: tinker.types.SampledSequence
    ) -> ScoredAnswer:
        tokens = list(sequence.tokens)
        ended = sequence.stop_reason == "stop"
        text = self._tokenizer.decode(tokens[:-1] if ended else tokens)
        return ScoredAnswer(
            prompt=prompt,
            tokens=tokens,
            logprobs=list(sequence.logprobs or []),
            text=text,
            reward=reward(problem, text=text, ended=ended),
        )

    def _train(
        self,
        groups: list[list[ScoredAnswer]],
        advantage: np.ndarray[tuple[int, ...], np.dtype[np.float64]],
        rate: float,
    ) -> float:
        """Train epochs of shuffled minibatches, all submitted in advance. Returns the summed
        loss."""
        configuration = self._configuration
        data = [
            policy_datum(rollout, advantage=float(advantage[row, column]))
            for row, group in enumerate(groups)
            for column, rollout in enumerate(group)
        ]
        adam = configuration.adam(rate)
        order = list(range(len(data)))
        size = -(-len(order) // configuration.minibatches)
        pending = []
        for _epoch in range(configuration.epochs):
            self._rng.shuffle(order)
            for start in range(0, len(order), size):
                batch = [data[index] for index in order[start : start + size]]
                pending.append(
                    (
                        self._client.forward_backward(batch, configuration.loss),
                        self._client.optim_step(adam),
                    )
                )
        total = 0.0
        for computed, stepped in pending:
            total += computed.result().metrics["loss:sum"]
            stepped.result()
        return total
