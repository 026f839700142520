"""One update of the demo with plain torch and transformers: padded sequences, importance sampling,
clipping, fused AdamW."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM


@dataclass(frozen=True)
class Sample:
    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    reward: float


class PlainUpdates:
    """`compiled`: model and loss under `torch.compile`, with dynamic lengths."""

    def __init__(self, model: Path, *, compiled: bool) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=5e-4, betas=(0.9, 0.99), weight_decay=0.0, fused=True
        )
        self._loss_of = torch.compile(self._loss, dynamic=True) if compiled else self._loss

    def update(self, batch: list[Sample]) -> None:
        length = max(len(sample.prompt) + len(sample.tokens) for sample in batch) - 1
        inputs = np.zeros((len(batch), length), dtype=np.int64)
        targets = np.zeros_like(inputs)
        old = np.zeros(inputs.shape, dtype=np.float32)
        advantages = np.zeros_like(old)
        for row, sample in enumerate(batch):
            sequence = sample.prompt + sample.tokens
            start, end = len(sample.prompt) - 1, len(sequence) - 1
            inputs[row, :end] = sequence[:-1]
            targets[row, :end] = sequence[1:]
            old[row, start:end] = sample.logprobs
            advantages[row, start:end] = sample.reward
        loss = self._loss_of(*map(torch.from_numpy, (inputs, targets, old, advantages)))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        loss.item()

    def _loss(self, inputs, targets, old, advantages) -> torch.Tensor:
        logits = self.model(input_ids=inputs, use_cache=False).logits
        picked = logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
        ratio = (picked - old).exp()
        return -(ratio * advantages).sum()
