"""The batches of the training measurements, equal for Tandem and a plain loop."""

from __future__ import annotations

import random

BATCHES = {
    "64 × 128 tokens": (64, 128, 128),
    "64 × 16 to 512 tokens": (64, 16, 512),
    "256 × 4 to 64 tokens": (256, 4, 64),
}
"""Number of sequences, and the bounds of their uniformly distributed lengths."""

WAYS = {"whole": 10**9, "sorted": 16}
"""Splits of a batch in a plain loop: the most sequences of a forward pass."""

VOCABULARY = 98


def batch(name: str) -> list[list[int]]:
    """Return the token ids of each sequence. n + 1 ids train n targets."""
    count, shortest, longest = BATCHES[name]
    generator = random.Random(name)
    return [
        [
            generator.randrange(3, VOCABULARY)
            for _ in range(generator.randint(shortest, longest) + 1)
        ]
        for _ in range(count)
    ]


def targets(sequences: list[list[int]]) -> int:
    return sum(len(sequence) - 1 for sequence in sequences)
