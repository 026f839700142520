"""The sampling workloads, equal for the gateway and the engine alone."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Workload:
    """`requests` prompts of 4 tokens with `samples` answers of exactly `max_tokens` tokens each."""

    requests: int
    samples: int
    max_tokens: int

    @property
    def tokens(self) -> int:
        return self.requests * self.samples * self.max_tokens


WORKLOADS = {
    "64 requests × 1 × 64 tokens": Workload(requests=64, samples=1, max_tokens=64),
    "64 requests × 8 × 64 tokens": Workload(requests=64, samples=8, max_tokens=64),
    "100 requests × 8 × 4 tokens": Workload(requests=100, samples=8, max_tokens=4),
}


def prompts(workload: Workload) -> list[list[int]]:
    return [[20 + i % 10, 30 + i // 10 % 10, 40, 21] for i in range(workload.requests)]
