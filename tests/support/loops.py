"""A policy without a server for tests of the loop: its state is a function of its training."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tandem.rl import Example, RLConfig
from tandem.rl.rollouts import Group, Turn
from tandem.rl.server import EngineLoad


class NumberTokenizer:
    """A token is a number, and its text the number and a space."""

    all_special_ids = ()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))


def numbered(count: int) -> list[Example]:
    return [Example([7, number], {"number": number}) for number in range(count)]


async def by_answer(example: Example, answer: str) -> float:
    """A reward between 0 and 1 that differs between answers."""
    return int(answer.split()[-1]) / 1000


def a_config(**changes: object) -> RLConfig:
    usual = RLConfig(steps=10, groups_per_step=4, group_size=2, max_tokens=4, learning_rate=1e-3)
    return replace(usual, **changes)


@dataclass
class Disk:
    """Saved states of fake policies, which outlive their loop."""

    states: dict[str, FakeState] = field(default_factory=dict)


@dataclass(frozen=True)
class FakeState:
    step: int = 0
    digest: str = ""
    trained: tuple[int, ...] = ()


class FakeSampler:
    def __init__(self, state: FakeState, policy: FakePolicy) -> None:
        self.step = state.step
        self._state = state
        self._policy = policy

    async def sample(self, prompt, *, n, max_tokens, temperature, seed, stop) -> list[Turn]:
        return await self._policy.answer(self._state, prompt, n=n, tokens=max_tokens, seed=seed)


class FakePolicy:
    """Samples and trains in given seconds. Tokens depend on the weights, prompt and seed alone, and
    the weights on all trained datums, their order and learning rates."""

    def __init__(
        self,
        state: FakeState = FakeState(),
        *,
        disk: Disk | None = None,
        sampling: float = 1.0,
        training: float = 1.0,
        syncing: float = 0.0,
    ) -> None:
        self.state = state
        self.disk = disk or Disk()
        self.seconds = {"sampling": sampling, "training": training, "sync": syncing}
        self.sampling_now = 0
        self.most_sampling = 0
        self.trained_at: list[float] = []
        self.events: Counter[str] = Counter()
        self.engine_load: EngineLoad | None = None
        self._sampled = state
        self._trainer = asyncio.Lock()

    @property
    def step(self) -> int:
        return self.state.step

    async def sample(self, prompt, *, n, max_tokens, temperature, seed, stop) -> list[Turn]:
        return await self.answer(self._sampled, prompt, n=n, tokens=max_tokens, seed=seed)

    async def answer(
        self, state: FakeState, prompt: Sequence[int], *, n: int, tokens: int, seed: int | None
    ) -> list[Turn]:
        self.sampling_now += n
        self.most_sampling = max(self.most_sampling, self.sampling_now)
        self.events["samples"] += 1
        try:
            await asyncio.sleep(self.seconds_of_sample(prompt, seed))
        finally:
            self.sampling_now -= n
        return [
            Turn(
                observation=tuple(prompt),
                tokens=[_number(state.digest, prompt, seed, i, t) for t in range(tokens)],
                logprobs=[-0.5] * tokens,
                steps=[state.step] * tokens,
            )
            for i in range(n)
        ]

    def seconds_of_sample(self, prompt: Sequence[int], seed: int | None) -> float:
        return self.seconds["sampling"]

    async def train(self, data, loss, settings, adam):
        async with self._trainer:
            await asyncio.sleep(self.seconds["training"])
        self.trained_at.append(asyncio.get_running_loop().time())
        rows = [datum.model_input.to_ints() for datum in data]
        content = json.dumps([self.state.digest, rows, adam.learning_rate])
        digest = hashlib.sha256(content.encode()).hexdigest()
        self.state = FakeState(
            step=self.state.step + 1,
            digest=digest,
            trained=(*self.state.trained, *sorted({row[1] for row in rows})),
        )
        return {"loss:sum": _number(digest) / 1000}

    async def sync(self, timeout: float) -> None:
        state = self.state
        async with asyncio.timeout(timeout):
            await asyncio.sleep(self.seconds["sync"])
        self._sampled = state

    def snapshot(self) -> Awaitable[FakeSampler]:
        taken: asyncio.Future[FakeSampler] = asyncio.get_running_loop().create_future()
        taken.set_result(FakeSampler(self.state, self))
        return taken

    async def save(self, name: str) -> str:
        path = f"tinker://fake/weights/{name}"
        self.disk.states[path] = self.state
        await asyncio.sleep(0)
        return path

    async def resolve(self, groups: Sequence[Group]) -> list[Group]:
        return list(groups)

    async def load(self) -> EngineLoad | None:
        return self.engine_load


def on_disk(disk: Disk, **settings: float):
    """Return a function for `train` that continues a fake policy."""

    def open_policy(path: str | None) -> FakePolicy:
        state = FakeState() if path is None else disk.states[path]
        return FakePolicy(state, disk=disk, **settings)

    return open_policy


def steps_in(folder: Path) -> int:
    file = folder / "state.json"
    return json.loads(file.read_text())["step"] if file.exists() else 0


def _number(*parts: object) -> int:
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:4]) % 1000
