"""One rank's part in every operation. All ranks run this same code on the same operation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from tandem.v1 import trainer_pb2
from tandem.weights import Manifest
from trainer_service.backends.base import TrainerBackend
from trainer_service.base_model import BaseModelFiles
from trainer_service.batch import Batch, Float32Array, Int64Array, ranges, starts_of
from trainer_service.checkpoint import CheckpointRecord, Counters, load, save
from trainer_service.control import Control
from trainer_service.lanes import LaneGradients, Lanes
from trainer_service.microbatch import layout_of, make_micro_batch
from trainer_service.optimizers import StepSettings
from trainer_service.plan import RankPlan, plan_batch
from trainer_service.publish import VersionRequest, publish


@dataclass(frozen=True)
class Computed:
    """What a forward_backward gave, on rank 0: `logprobs` [E] and the loss's metrics."""

    logprobs: Float32Array
    metrics: dict[str, float]


@dataclass(frozen=True)
class Part:
    """What one share of a plan gave: the loss and its sums [1 + s], its maxima [m], and the
    logprobs in plan order."""

    sums: NDArray[np.float64]
    maxima: NDArray[np.float64]
    logprobs: Float32Array


class RankTrainer:
    """`step` counts the optimizer steps applied, on every rank alike."""

    def __init__(
        self,
        *,
        backend: TrainerBackend,
        control: Control,
        micro_batch_tokens: int,
        model_path: Path,
        model_name: str = "",
        lanes: Lanes | None = None,
    ) -> None:
        self.backend = backend
        self.control = control
        self.step = 0
        self._lanes = lanes
        self.base = BaseModelFiles(name=model_name or model_path.name, path=model_path)
        # On a CPU the activations of more tokens than this fall out of the cache.
        self._micro_batch_tokens = micro_batch_tokens or (
            2048 if backend.device == "cpu" else 16384
        )

    def forward_backward(self, batch: Batch) -> Computed | None:
        """Computes this rank's share and adds its gradients; rank 0 gets everybody's results."""
        plan = plan_batch(
            batch.lengths.tolist(),
            ranks=self._lanes.count if self._lanes else self.control.size,
            micro_batch_tokens=self._micro_batch_tokens,
            group=batch.loss.group,
            packed=self.backend.packs,
        )
        parts = self._in_lanes(batch, plan) if self._lanes else self._on_ranks(batch, plan)
        if not parts:
            return None
        loss = batch.loss
        whole = np.empty(int(batch.sizes.sum()), np.float32)
        total = np.zeros(1 + len(loss.sum_names))
        greatest = np.full(len(loss.max_names), -np.inf)
        for share, part in zip(plan, parts, strict=True):
            total += part.sums
            greatest = np.maximum(greatest, part.maxima)
            whole[_entries(batch, share)] = part.logprobs
        named = dict(zip(loss.sum_names, total[1:].tolist(), strict=True))
        named.update(zip(loss.max_names, greatest.tolist(), strict=True))
        metrics = {
            "loss:sum": float(total[0]),
            "tokens:sum": float(batch.lengths.sum()),
            **loss.metrics(named),
        }
        return Computed(logprobs=whole, metrics=metrics)

    def _on_ranks(self, batch: Batch, plan: Sequence[RankPlan]) -> list[Part]:
        """This rank's share, and on rank 0 those of all others, in the order of the plan."""
        mine = self._compute(batch, plan[self.control.rank], keep=self.backend.backward)
        numbers = np.concatenate([mine.sums, mine.maxima])
        width = numbers.nbytes
        counts = [int(sum(batch.sizes[list(part)].sum() for part in share)) for share in plan]
        received = self.control.gather_known(
            numbers.tobytes() + mine.logprobs.tobytes(),
            sizes=[width + 4 * count for count in counts],
        )
        parts = []
        for part in received:
            theirs = np.frombuffer(part, np.float64, count=len(numbers))
            parts.append(
                Part(
                    sums=theirs[: len(mine.sums)],
                    maxima=theirs[len(mine.sums) :],
                    logprobs=np.frombuffer(part, np.float32, offset=width),
                )
            )
        return parts

    def _in_lanes(self, batch: Batch, plan: Sequence[RankPlan]) -> list[Part]:
        """All shares in this process, side by side; gradients are added in the plan's order, so
        that the sum does not depend on which lane was quicker."""
        assert self._lanes is not None
        held = [LaneGradients(self.backend.gradients) for _ in plan]
        parts = self._lanes.map(
            [
                functools.partial(self._compute, batch, share, keep=mine.add)
                for share, mine in zip(plan, held, strict=True)
            ]
        )
        for mine in held:
            self.backend.accumulate(mine.total)
        return parts

    def _compute(
        self, batch: Batch, share: RankPlan, *, keep: Callable[[torch.Tensor], None]
    ) -> Part:
        """One share of the plan; `keep` is given each loss to take the gradients of."""
        loss = batch.loss
        gradients = not batch.forward_only
        chosen: list[torch.Tensor] = []
        sums: list[torch.Tensor] = []
        maxima: list[torch.Tensor] = []
        for datums in share:
            if not datums and self._lanes:
                continue
            # A rank that has run out of datums computes one with weight zero, so that its
            # collectives match those of the others.
            micro_batch = make_micro_batch(batch, datums or (0,), packed=self.backend.packs)
            logprobs = self.backend.logprobs(micro_batch, gradients=gradients)
            if not datums:
                if gradients:
                    keep(logprobs.sum() * 0.0)
                continue
            layout = layout_of(batch, micro_batch, datums, device=logprobs.device)
            inputs = self.backend.inputs(micro_batch)
            result = loss.compute(logprobs, inputs, batch.settings, layout)
            if gradients:
                keep(result.loss)
            chosen.append(logprobs.detach())
            sums.append(torch.stack([result.loss.detach(), *result.sums]).double())
            if result.maxima:
                maxima.append(torch.stack(result.maxima).double())
        if not chosen:
            return Part(
                sums=np.zeros(1 + len(loss.sum_names)),
                maxima=np.full(len(loss.max_names), -np.inf),
                logprobs=np.zeros(0, np.float32),
            )
        return Part(
            sums=torch.stack(sums).sum(0).cpu().numpy(),
            maxima=torch.stack(maxima).amax(0).cpu().numpy() if maxima else np.zeros(0),
            logprobs=torch.cat(chosen).cpu().numpy(),
        )

    def optim_step(self, settings: StepSettings) -> dict[str, float]:
        """One step. `GradientsNotFinite` is raised on all ranks alike."""
        metrics = self.backend.optimizer.step(settings)
        self.step += 1
        return metrics

    def publish(self, request: trainer_pb2.PublishRequest) -> Manifest | None:
        """Rank 0 gets the manifest, or `StorageFull` or `PublishFailed`."""
        return publish(
            version_request(request, step=self.step),
            backend=self.backend,
            control=self.control,
            base=self.base,
        )

    def save(self, request: trainer_pb2.SaveCheckpointRequest) -> CheckpointRecord | None:
        """Rank 0 gets the record, or `StorageFull` or `PublishFailed`."""
        counters = Counters(
            run_id=request.header.run_id, step=self.step, last_seq_id=request.header.seq_id
        )
        path = Path(request.path)
        return save(
            path,
            backend=self.backend,
            control=self.control,
            counters=counters,
            base=self.base,
        )

    def load(self, request: trainer_pb2.LoadCheckpointRequest) -> None:
        """Gradients held are dropped; the step counter is that of the checkpoint."""
        record = load(
            Path(request.path),
            optimizer=request.optimizer,
            backend=self.backend,
            control=self.control,
        )
        self.step = record.step

    def drop_gradients(self) -> None:
        self.backend.optimizer.drop_gradients()


def version_request(request: trainer_pb2.PublishRequest, *, step: int) -> VersionRequest:
    return VersionRequest(
        name=request.version.name,
        path=Path(request.version.path),
        run_id=request.version.run_id or request.header.run_id,
        parent=request.parent,
        step=step,
        merged=request.merged,
    )


def _entries(batch: Batch, share: RankPlan) -> Int64Array:
    """Where the logprobs of a rank, in plan order, belong in the batch's [E]."""
    datums = np.array([datum for part in share for datum in part], np.int64)
    return ranges(starts=starts_of(batch.sizes)[datums], sizes=batch.sizes[datums])
