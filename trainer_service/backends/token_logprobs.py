"""Log probabilities of a micro-batch's targets, by a loaded model."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from tandem.telemetry import get_log
from trainer_service.backends.base import to_device
from trainer_service.backends.loop import MicroBatchTask, Objective
from trainer_service.batches.micro_batches import MicroBatch, of_two_tokens, one_row
from trainer_service.lora.adapters import ActiveAdapters, Adapter, RunRows
from trainer_service.losses.base import LossResult
from trainer_service.models.huggingface import ModelFacts
from trainer_service.models.logprobs import (
    ChunkedLogprobs,
    CompiledLogSoftmax,
    divide,
    return_logits,
)
from trainer_service.models.packing import row_inputs

if TYPE_CHECKING:
    from torch import Tensor


class TokenLogprobs:
    """The logprobs of tokens, for all runs that share the model and its `active` adapters.

    `apart`: the model can end at its hidden states. Logits are then made in chunks of at most
    `rows` rows, else whole. `compiled`: the blocks are compiled and take no row of a single token,
    and so is the function from logits to log probabilities."""

    def __init__(
        self,
        model: nn.Module,
        active: ActiveAdapters,
        *,
        facts: ModelFacts,
        device: str,
        apart: bool,
        rows: int,
        compiled: bool,
    ) -> None:
        self._model = model
        self._active = active
        self._device = device
        self._compiled = compiled
        self._tail: dict[str, nn.Module] = {}
        if apart:
            logits_of, self._tail = divide(model)
        else:
            get_log().warning("logits_whole", architecture=facts.architecture)
            return_logits(model)
            logits_of, rows = _as_they_are, sys.maxsize
        self._logprobs = ChunkedLogprobs(
            logits_of,
            self._of_tail,
            rows=rows,
            compiled=CompiledLogSoftmax() if compiled else None,
        )

    def logprobs_of(self, micro_batch: MicroBatch) -> Tensor:
        """Log probabilities of the targets, float32 [e], differentiable if gradients are on."""
        chosen = self._logprobs(self._hidden_of(micro_batch), self._targets_of(micro_batch))
        chosen = chosen.reshape(-1)
        select = self._select_of(micro_batch)
        return chosen if select is None else chosen.index_select(0, select)

    def in_chunks(self, tokens: int) -> bool:
        """True if their logits never exist all at once."""
        return tokens > self._logprobs.rows

    def with_gradients(
        self, micro_batch: MicroBatch, objective: Objective
    ) -> tuple[Tensor, LossResult]:
        """As `TrainerBackend.loss_of` for a loss by entry, with gradients made at once."""
        return self._in_chunks(self._hidden_of(micro_batch), micro_batch, objective)

    def of_runs(
        self, tasks: Sequence[MicroBatchTask], adapters: Sequence[Mapping[str, Adapter]]
    ) -> list[tuple[Tensor, LossResult]]:
        """As `TrainerBackend.losses_of`, with one pass through the body.

        Logits are made for all runs at once if they fit into a chunk, else run by run."""
        runs = [
            RunRows(task.micro_batch.tokens.size, own)
            for task, own in zip(tasks, adapters, strict=True)
        ]
        sizes = [run.rows for run in runs]
        with self._active.of_rows(runs):
            hidden = self._hidden_of(one_row([task.micro_batch for task in tasks]))
            if sum(sizes) <= self._logprobs.rows:
                tables = self._logprobs.of_vocabulary(hidden).split(sizes)
                return [self._of_table(*each) for each in zip(tasks, tables, strict=True)]
        found = []
        for task, run, own in zip(tasks, runs, hidden.split(sizes), strict=True):
            with self._active.of_rows([run]):
                if task.by_entry:
                    found.append(self._in_chunks(own, task.micro_batch, task.objective))
                else:
                    found.append(self._of_table(task, self._logprobs.of_vocabulary(own)))
        return found

    def _of_table(self, task: MicroBatchTask, table: Tensor) -> tuple[Tensor, LossResult]:
        """`table`: the log probabilities [T, vocabulary] of all tokens."""
        chosen = table.gather(-1, self._targets_of(task.micro_batch)).reshape(-1)
        select = self._select_of(task.micro_batch)
        logprobs = chosen if select is None else chosen.index_select(0, select)
        return logprobs.detach(), task.objective(logprobs)

    def _in_chunks(
        self, hidden: Tensor, micro_batch: MicroBatch, objective: Objective
    ) -> tuple[Tensor, LossResult]:
        def gradient_of(logprobs: Tensor) -> Tensor:
            with torch.enable_grad():
                leaf = logprobs.detach().requires_grad_()
                (gradient,) = torch.autograd.grad(objective(leaf).loss, leaf)
            return gradient

        logprobs, carrier = self._logprobs.with_gradients(
            hidden,
            self._targets_of(micro_batch),
            select=self._select_of(micro_batch),
            gradient_of=gradient_of,
        )
        result = objective(logprobs)
        return logprobs, replace(result, loss=result.loss + carrier)

    def _hidden_of(self, micro_batch: MicroBatch) -> Tensor:
        """The hidden states [rows, hidden] of all tokens, without an attention mask.

        In a causal model real tokens never see padding on the right."""
        single = self._compiled and micro_batch.tokens.shape[1] == 1
        if single:
            micro_batch = of_two_tokens(micro_batch)
        extra: dict[str, Tensor | int] = {}
        if micro_batch.positions is not None and micro_batch.bounds is not None:
            extra = row_inputs(micro_batch.positions, micro_batch.bounds, self._device)
        tokens = to_device(micro_batch.tokens, self._device)
        hidden: Tensor = self._model(input_ids=tokens, use_cache=False, **extra)
        return hidden[:, 0] if single else hidden.flatten(0, 1)

    def _targets_of(self, micro_batch: MicroBatch) -> Tensor:
        return to_device(micro_batch.targets, self._device).flatten(0, 1)

    def _select_of(self, micro_batch: MicroBatch) -> Tensor | None:
        if micro_batch.select is None:
            return None
        return to_device(micro_batch.select, self._device)

    def _of_tail(self) -> list[nn.Parameter]:
        own = [p for part in self._tail.values() for p in part.parameters() if p.requires_grad]
        joint = [run.by_module for run in self._active.runs_of_rows]
        for adapters in joint or [self._active.by_module]:
            for name, adapter in adapters.items():
                if name.partition(".")[0] in self._tail:
                    own += [adapter.lora_A, adapter.lora_B]
        return own


def _as_they_are(logits: Tensor) -> Tensor:
    return logits
