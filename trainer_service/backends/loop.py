"""The default `TrainerBackend.forward_backward`: a loop over the micro-batches of one share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from tandem.errors import describe
from trainer_service.batches.loss_inputs import Float32Array
from trainer_service.batches.memory import MicroBatchTooLarge, free_on, ran_out_of_memory, tokens_of
from trainer_service.batches.micro_batches import (
    STAND_IN_TOKENS,
    MicroBatch,
    MicroBatchPlan,
    RankPlan,
    layout_of,
    make_micro_batch,
    stand_in,
)
from trainer_service.batches.validation import Batch
from trainer_service.losses.base import LossResult

if TYPE_CHECKING:
    from torch import Tensor, nn

Keep = Callable[["Tensor"], None]
"""Adds the gradients of a micro-batch's loss to the held ones."""

Done = Callable[[int], None]
"""Called with the tokens of each computed micro-batch."""

Objective = Callable[["Tensor"], LossResult]
"""From a micro-batch's log probabilities [e] to its loss."""


@dataclass(frozen=True)
class MicroBatchTask:
    """A micro-batch and its loss. `by_entry`: see `Loss.by_entry`."""

    micro_batch: MicroBatch
    objective: Objective
    by_entry: bool


class MicroBatchBackend(Protocol):
    """The methods of `TrainerBackend` that compute one micro-batch."""

    packs: bool
    device: str

    def logprobs(self, micro_batch: MicroBatch, *, gradients: bool) -> Tensor: ...

    def loss_of(
        self, micro_batch: MicroBatch, objective: Objective, *, by_entry: bool
    ) -> tuple[Tensor, LossResult]: ...

    @property
    def trained(self) -> Sequence[nn.Parameter]: ...

    def losses_of(
        self, runs: Sequence[MicroBatchBackend], tasks: Sequence[MicroBatchTask]
    ) -> list[tuple[Tensor, LossResult]]: ...

    def inputs(self, micro_batch: MicroBatch) -> dict[str, Tensor]: ...


@dataclass(frozen=True)
class ShareResult:
    """One share: the loss and its sums [1 + s], its maxima [m], and logprobs in plan order."""

    sums: NDArray[np.float64]
    maxima: NDArray[np.float64]
    logprobs: Float32Array


def compute_share(
    backend: MicroBatchBackend, batch: Batch, share: RankPlan, *, keep: Keep, done: Done
) -> ShareResult:
    """Compute one share, with `keep` for each micro-batch. Raises `MicroBatchTooLarge`."""
    chosen: list[Tensor] = []
    sums: list[Tensor] = []
    maxima: list[Tensor] = []
    for datums in share:
        computed, reason, free = None, "", 0
        try:
            if datums:
                computed = _compute(backend, batch, datums, keep)
            else:
                _join_collectives(backend, batch, keep)
        except Exception as error:
            if not ran_out_of_memory(error):
                raise
            reason = describe(error).partition("\n")[0][:300]
            free = free_on(backend.device)
        if reason:  # raised here, it does not hold the other error's memory
            lengths = batch.lengths.tolist()
            tokens = tokens_of(datums, lengths, packed=backend.packs) or STAND_IN_TOKENS
            raise MicroBatchTooLarge(tokens, reason, free=free)
        if computed is None:
            continue
        logprobs, result = computed
        done(int(batch.lengths[list(datums)].sum()))
        chosen.append(logprobs)
        sums.append(torch.stack([result.loss.detach(), *result.sums]).double())
        if result.maxima:
            maxima.append(torch.stack(result.maxima).double())
    if not chosen:
        return empty_share(batch)
    return ShareResult(
        sums=torch.stack(sums).sum(0).cpu().numpy(),
        maxima=torch.stack(maxima).amax(0).cpu().numpy() if maxima else np.zeros(0),
        logprobs=torch.cat(chosen).cpu().numpy(),
    )


def empty_share(batch: Batch) -> ShareResult:
    return ShareResult(
        sums=np.zeros(1 + len(batch.loss.sum_names)),
        maxima=np.full(len(batch.loss.max_names), -np.inf),
        logprobs=np.zeros(0, np.float32),
    )


@dataclass(frozen=True)
class JointShare:
    """One run's part of a joint pass: a micro-batch of its batch."""

    backend: MicroBatchBackend
    batch: Batch
    datums: MicroBatchPlan


def compute_joint_shares(shares: Sequence[JointShare], *, keep: Keep) -> list[ShareResult]:
    """Compute the micro-batches of several runs in one pass, with `keep` for their losses' sum.

    Raises any error of one of them. Then nothing is held if `keep` was not called."""
    tasks = [_task_of(each.backend, each.batch, each.datums) for each in shares]
    found = shares[0].backend.losses_of([each.backend for each in shares], tasks)
    keep(torch.stack([result.loss for _, result in found]).sum())
    results = []
    for logprobs, result in found:
        sums = torch.stack([result.loss.detach(), *result.sums]).double()
        maxima = torch.stack(result.maxima).double() if result.maxima else torch.zeros(0)
        results.append(
            ShareResult(
                sums=sums.cpu().numpy(),
                maxima=maxima.cpu().numpy(),
                logprobs=logprobs.cpu().numpy(),
            )
        )
    return results


def _join_collectives(backend: MicroBatchBackend, batch: Batch, keep: Keep) -> None:
    """Compute a tiny stand-in with a weight of zero."""
    gradients = not batch.forward_only
    logprobs = backend.logprobs(stand_in(packed=backend.packs), gradients=gradients)
    if gradients:
        keep(logprobs.sum() * 0.0)


def _task_of(backend: MicroBatchBackend, batch: Batch, datums: MicroBatchPlan) -> MicroBatchTask:
    micro_batch = make_micro_batch(batch, datums, packed=backend.packs)
    loss, settings = batch.loss, batch.settings
    inputs = backend.inputs(micro_batch)
    layout = layout_of(batch, micro_batch, datums, device=torch.device(backend.device))

    def objective(logprobs: Tensor) -> LossResult:
        return loss.compute(logprobs, inputs, settings, layout)

    return MicroBatchTask(micro_batch, objective, by_entry=loss.by_entry(settings))


def _compute(
    backend: MicroBatchBackend, batch: Batch, datums: MicroBatchPlan, keep: Keep
) -> tuple[Tensor, LossResult]:
    task = _task_of(backend, batch, datums)
    if batch.forward_only:
        logprobs = backend.logprobs(task.micro_batch, gradients=False)
        return logprobs, task.objective(logprobs)
    logprobs, result = backend.loss_of(task.micro_batch, task.objective, by_entry=task.by_entry)
    keep(result.loss)
    # Detached, so that pieces of the graph do not fragment the next micro-batch's memory.
    return logprobs.detach(), replace(result, loss=result.loss.detach())
