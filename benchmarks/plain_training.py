"""A plain transformers training loop: forward and backward over a batch.

The process (`python -m benchmarks.plain_training MODEL THREADS [compiled]`, `benchmarks.in_turn`)
answers with wall and processor seconds of a batch split in one of `WAYS`. `whole` is one forward
pass. `sorted` takes 16 sequences of similar length at a time, which need little padding and stay in
the cache. `compiled` is the whole model under `torch.compile`, with dynamic lengths."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from benchmarks.in_turn import answers
from benchmarks.training_batches import WAYS, batch


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
    path, threads = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    if "compiled" in sys.argv[3:]:
        model.forward = torch.compile(model.forward, dynamic=True)

    def once(name: str, way: str) -> tuple[float, float]:
        sequences = batch(name)
        began, busy = time.perf_counter(), time.process_time()
        forward_backward(model, sequences, rows=WAYS[way])
        spent = time.perf_counter() - began, time.process_time() - busy
        model.zero_grad()
        return spent

    answers(once)


if __name__ == "__main__":
    main()
