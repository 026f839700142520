"""A loop with 10,000 rollouts in flight: its memory, and the lag of its event loop.

Samples come from a policy without a server, so that only the loop is measured: 512 tokens for each
rollout, after 20 to 30 s. `make bench-rollouts`."""

from __future__ import annotations

import argparse
import asyncio
import random
import time

import psutil
import tinker  # noqa: F401 - its import takes seconds
from rich.console import Console

from benchmarks.record import machine, save
from tandem.rl import Example, RLConfig, train_async
from tandem.rl.rollouts import Turn
from tandem.rl.server import EngineLoad

_TICK = 0.01


class _Numbers:
    """A tokenizer without text."""

    all_special_ids = ()

    def encode(self, text: str) -> list[int]:
        return [1]

    def decode(self, ids: list[int]) -> str:
        return str(ids[-1])


class _FarPolicy:
    """Answers late. It counts its rollouts in flight."""

    def __init__(self, tokens: int) -> None:
        self.step = 0
        self.running = self.most = 0
        self._tokens = tokens
        self._random = random.Random(0)

    async def sample(self, prompt, *, n, max_tokens, temperature, seed, stop) -> list[Turn]:
        self.running += n
        self.most = max(self.most, self.running)
        await asyncio.sleep(self._random.uniform(20, 30))
        self.running -= n
        return [
            Turn(
                observation=prompt,
                tokens=[self._random.randrange(1000) for _ in range(self._tokens)],
                logprobs=[-0.5] * self._tokens,
                steps=[self.step] * self._tokens,
            )
            for _ in range(n)
        ]

    async def train(self, data, *_) -> dict[str, float]:
        await asyncio.sleep(1)
        self.step += 1
        return {"loss:sum": 0.0}

    async def sync(self, timeout: float) -> None:
        await asyncio.sleep(0.1)

    def snapshot(self):
        raise AssertionError("nothing is evaluated")

    async def save(self, name: str) -> str:
        return name

    async def resolve(self, groups):
        return groups

    async def load(self) -> EngineLoad:
        return EngineLoad(waiting=0, kv_used=0.5)


async def _reward(_example: Example, answer: str) -> float:
    return float(answer[-1] in "02468")


async def _lags(lags: list[float]) -> None:
    while True:
        started = time.perf_counter()
        await asyncio.sleep(_TICK)
        lags.append(time.perf_counter() - started - _TICK)


async def measure(rollouts: int, *, tokens: int, steps: int) -> dict[str, object]:
    """Run a loop one batch ahead that holds `rollouts`."""
    config = RLConfig(
        steps=steps,
        groups_per_step=rollouts // 16,
        group_size=8,
        max_tokens=tokens,
        learning_rate=1e-5,
        off_by=1,
        max_concurrency=rollouts,
    )
    policy = _FarPolicy(tokens)
    lags: list[float] = []
    dataset = [Example([number]) for number in range(10_000)]
    memory = psutil.Process().memory_info
    before = memory().rss
    watching = asyncio.create_task(_lags(lags))
    started = time.perf_counter()
    await train_async(policy, dataset, _reward, config, tokenizer=_Numbers())
    watching.cancel()
    lags.sort()
    return {
        "rollouts": rollouts,
        "tokens each": tokens,
        "most in flight": policy.most,
        "steps": steps,
        "seconds": round(time.perf_counter() - started, 1),
        "memory_mib": round((memory().rss - before) / 2**20),
        "lag_p50_ms": round(lags[len(lags) // 2] * 1e3, 1),
        "lag_p99_ms": round(lags[int(len(lags) * 0.99)] * 1e3, 1),
        "lag_max_ms": round(lags[-1] * 1e3, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.rollouts", description=__doc__)
    parser.add_argument("--rollouts", type=int, nargs="*", default=[1_000, 10_000])
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--no-save", action="store_true", help="only print")
    arguments = parser.parse_args()
    rows = [
        asyncio.run(measure(count, tokens=arguments.tokens, steps=3))
        for count in arguments.rollouts
    ]
    console = Console()
    for row in rows:
        console.print(row)
    if not arguments.no_save:
        console.print(save({"machine": machine(), "rollouts in flight": rows}))


if __name__ == "__main__":
    main()
