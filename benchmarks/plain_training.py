"""A plain transformers training loop: only forward and backward over a batch.

Run as a process of its own (`python -m benchmarks.plain_training MODEL THREADS ROUNDS [compiled]`);
prints one JSON object: tokens per second of each round, for each batch and each way to split it.
Padding is on the right, as collators do it. `whole` is one forward pass over everything; `sorted`
takes passes of 16 sequences of similar length, which need little padding and stay in the cache.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from benchmarks.training_batches import BATCHES, batch, targets

WAYS = {"whole": 10**9, "sorted": 16}


def forward_backward(model: torch.nn.Module, sequences: list[list[int]], *, rows: int) -> None:
    """Add the gradients of the summed cross-entropy."""
    ordered = sorted(sequences, key=len, reverse=True)
    for start in range(0, len(ordered), rows):
        part = ordered[start : start + rows]
        longest = max(map(len, part)) - 1
        inputs = torch.zeros(len(part), longest, dtype=torch.long)
        labels = torch.full_like(inputs, -100)
        for row, sequence in enumerate(part):
            inputs[row, : len(sequence) - 1] = torch.tensor(sequence[:-1])
            labels[row, : len(sequence) - 1] = torch.tensor(sequence[1:])
        logits = model(input_ids=inputs, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"
        )
        loss.backward()
        loss.item()


def main() -> None:
    path, threads, rounds = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    if "compiled" in sys.argv[4:]:
        model.forward = torch.compile(model.forward, dynamic=True)
    results: dict[str, dict[str, list[float]]] = {}
    for name in BATCHES:
        sequences = batch(name)
        for way, rows in WAYS.items():
            speeds = results.setdefault(name, {}).setdefault(way, [])
            for _ in range(rounds + 2):
                started = time.perf_counter()
                forward_backward(model, sequences, rows=rows)
                speeds.append(targets(sequences) / (time.perf_counter() - started))
                model.zero_grad()
            del speeds[:2]
    print(json.dumps(results))


if __name__ == "__main__":
    main()
