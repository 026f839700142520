"""One rank of a trainer: computes its share of each batch and applies optimizer steps."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch.distributed as dist

from tandem.backends.memory import wanted_tokens
from tandem.errors import CustomLossFailed, OutOfMemory
from tandem.protocol.worker import TrainingSpec
from tandem.telemetry import get_log
from tandem.v1 import trainer_pb2
from tandem.weights.layout import BaseModelFiles
from trainer_service.backends.base import TrainerBackend
from trainer_service.backends.loop import ShareResult
from trainer_service.batches.loss_inputs import Float32Array, Int64Array, starts_of
from trainer_service.batches.memory import MicroBatchTooLarge, free_on, largest
from trainer_service.batches.micro_batches import RankPlan, plan_batch, ranges
from trainer_service.batches.validation import Batch
from trainer_service.compute.control_group import ControlGroup
from trainer_service.compute.joint import JointBatch
from trainer_service.compute.parallel import ParallelMicroBatches
from trainer_service.losses.numbers import batch_sums
from trainer_service.optimizers import StepSettings

WARM_UP_TIMEOUT = timedelta(minutes=10)
"""For the slowest rank to compile, while the others wait for it in collectives."""


class BatchProgress:
    """The progress of the current operation, extrapolated from this rank's share."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.end_batch()

    def begin_batch(self, seq_id: int) -> None:
        with self._lock:
            self._seq_id, self._began = seq_id, time.perf_counter()

    def expect(self, *, tokens: int, share: int) -> None:
        with self._lock:
            self._tokens, self._share, self._done = tokens, share, 0

    def count_tokens(self, tokens: int) -> None:
        with self._lock:
            self._done += tokens

    @contextmanager
    def compiling(self) -> Iterator[None]:
        with self._lock:
            self._compiling = True
        yield
        with self._lock:
            self._compiling = False

    def end_batch(self) -> None:
        with self._lock:
            self._seq_id, self._began, self._compiling = 0, 0.0, False
            self._tokens, self._share, self._done = 0, 0, 0

    def read(self) -> trainer_pb2.ProgressReply:
        with self._lock:
            if not self._seq_id:
                return trainer_pb2.ProgressReply()
            return trainer_pb2.ProgressReply(
                seq_id=self._seq_id,
                seconds=time.perf_counter() - self._began,
                tokens_done=self._tokens * self._done // max(1, self._share),
                tokens=self._tokens,
                compiling=self._compiling,
            )


@dataclass(frozen=True)
class BatchResult:
    """`logprobs` [E], the loss's metrics, the `plan` (tokens of a micro-batch), and the sums and
    maxima for the numbers of a step, by `losses.numbers`."""

    logprobs: Float32Array
    metrics: dict[str, float]
    plan: int
    sums: Mapping[str, float]


class RankTrainer:
    """One rank, for one run. `step` counts optimizer steps, equal on every rank.

    `micro_batch_tokens` is the plan: the most tokens of a micro-batch, padding included.
    `snapshot_group` joins the threads that write snapshots."""

    def __init__(
        self,
        *,
        backend: TrainerBackend,
        control: ControlGroup,
        micro_batch_tokens: int,
        base: BaseModelFiles,
        parallel: ParallelMicroBatches | None = None,
        snapshot_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.backend = backend
        self.control = control
        self.snapshot_group = snapshot_group
        self.step = 0
        self.progress = BatchProgress()
        self.base = base
        self.parallel = parallel
        self._first_plan = micro_batch_tokens
        self.micro_batch_tokens = wanted_tokens(micro_batch_tokens, device=backend.device)

    def share(self, training: TrainingSpec, *, run: int) -> RankTrainer:
        """Return the trainer of another run of this model. Raises as `TrainerBackend.share`."""
        mine = self.control
        return RankTrainer(
            backend=self.backend.share(training),
            control=mine.of_run(run),
            micro_batch_tokens=self._first_plan,
            base=self.base,
            parallel=self.parallel,
            snapshot_group=self.snapshot_group,
        )

    def warm_up(self) -> None:
        """Compile the run's code, if it is not compiled yet. All ranks wait for the slowest."""
        backend = self.backend
        if backend.warm:
            return
        with self.progress.compiling(), self.control.patient(WARM_UP_TIMEOUT, backend.groups):
            if self.parallel:
                self.parallel.run_work(backend.warm_up)
            else:
                backend.warm_up()

    def forward_backward(
        self, batch: Batch, *, plan: int = 0, out_of_memory_at: int = 0
    ) -> BatchResult | None:
        """Compute this rank's share and add its gradients. Only rank 0 gets the result of the
        batch.

        A single rank that runs out of memory tries again: with the same plan if more memory is free
        by then, else with smaller micro-batches, which it keeps, or with checkpointed blocks.
        `out_of_memory_at` is the size of an earlier trainer's failed micro-batch, in tokens.

        Raises `OutOfMemory` (with the earlier gradients restored), `MicroBatchTooLarge`, or
        `CustomLossFailed` on rank 0."""
        self.warm_up()
        backend, plan = self.backend, plan or self.micro_batch_tokens
        # Several ranks cannot undo: the others already wait for this rank in collectives.
        alone = self.control.size == 1
        if out_of_memory_at:
            backend.checkpoint(out_of_memory_at)
        repeated = 0
        while True:
            mark = backend.mark() if alone else None
            try:
                computed = self._attempt(batch, plan)
            except MicroBatchTooLarge as error:
                tokens, reason, free = error.tokens, error.reason, error.free
            else:
                self.micro_batch_tokens = min(self.micro_batch_tokens, plan)
                return computed
            # Outside the except block the error's frames are freed, and with them the attempt's
            # tensors.
            if mark is None or not backend.undo(mark):
                raise MicroBatchTooLarge(tokens, reason)
            if plan != repeated and free_on(backend.device) > free:
                repeated = plan
                get_log().warning("out_of_memory_repeated", tokens=tokens, reason=reason)
                continue
            checkpoint = backend.checkpoint(tokens)
            after = self.plan_after(batch, tokens=tokens, reason=reason, checkpoint=checkpoint)
            plan = min(plan, after)
            get_log().warning(
                "out_of_memory", tokens=tokens, micro_batch_tokens=plan, reason=reason
            )

    def plan_after(
        self, batch: Batch, *, tokens: int, reason: str = "", checkpoint: bool = False
    ) -> int:
        """The plan after a micro-batch of `tokens` ran out of memory: half of it.

        If that would not make one smaller, return `tokens` for a try with checkpointed blocks, or
        raise `OutOfMemory` if there is none to make."""
        plan = max(1, tokens // 2)
        parts = self._plan(batch, plan)
        if largest(parts, batch.lengths.tolist(), packed=self.backend.packs) < tokens:
            return plan
        if checkpoint:
            return tokens
        raise OutOfMemory(
            f"a micro-batch of {tokens} tokens ran out of memory and cannot be divided"
            f"{reason and ': '}{reason}. Send shorter sequences, or give the trainer more memory "
            "or more ranks",
            tokens=tokens,
        )

    def _plan(self, batch: Batch, micro_batch_tokens: int) -> tuple[RankPlan, ...]:
        lengths = batch.lengths.tolist()
        return plan_batch(
            lengths,
            ranks=self.parallel.shares(sum(lengths)) if self.parallel else self._shares,
            micro_batch_tokens=micro_batch_tokens,
            group=batch.loss.group,
            packed=self.backend.packs,
        )

    @property
    def _shares(self) -> int:
        """The number of shares of a batch. Ranks that compute together have one share."""
        return self.backend.training.layout.shares(self.control.size)

    @property
    def _my_share(self) -> int:
        return self.control.rank * self._shares // self.control.size

    def _attempt(self, batch: Batch, micro_batch_tokens: int) -> BatchResult | None:
        plan = self._plan(batch, micro_batch_tokens)
        mine = plan if self.parallel else [plan[self._my_share]]
        self.progress.expect(
            tokens=int(batch.lengths.sum()),
            share=sum(int(batch.lengths[list(part)].sum()) for share in mine for part in share),
        )
        if self.parallel:
            results = self.parallel.compute(
                self.backend, batch, plan, done=self.progress.count_tokens
            )
        else:
            results = self._compute_on_ranks(batch, plan)
        loss = batch.loss
        if loss.failure is not None:  # a loss may fail on one rank only
            told = self.control.gather(loss.failure().encode("utf-8", "replace"))
            if failed := next(filter(None, told), b""):
                raise CustomLossFailed(failed.decode())
        return self.combined(batch, plan, results, tokens=micro_batch_tokens) if results else None

    def joint_batch(self, batch: Batch) -> JointBatch | None:
        """Return the batch for a pass with other runs, or None if it needs its own."""
        backend, loss = self.backend, batch.loss
        if batch.forward_only or loss.failure is not None or not len(batch.lengths):
            return None
        plan = self._plan(batch, self.micro_batch_tokens)
        joint = JointBatch(backend, batch, plan, self.micro_batch_tokens, self.parallel)
        by_entry = loss.by_entry(batch.settings)
        single = all(len(share) == 1 for share in plan)
        shares = [tokens for tokens in joint.sizes if tokens]
        if single and all(backend.joins(tokens, by_entry=by_entry) for tokens in shares):
            return joint
        return None

    def combined(
        self,
        batch: Batch,
        plan: Sequence[RankPlan],
        results: Sequence[ShareResult],
        *,
        tokens: int = 0,
    ) -> BatchResult:
        """Combine the shares' results. `tokens`: the plan, if it is not the trainer's own."""
        loss = batch.loss
        logprobs = np.empty(int(batch.sizes.sum()), np.float32)
        sums = np.zeros(1 + len(loss.sum_names))
        maxima = np.full(len(loss.max_names), -np.inf)
        for share, result in zip(plan, results, strict=True):
            sums += result.sums
            maxima = np.maximum(maxima, result.maxima)
            logprobs[_entries(batch, share)] = result.logprobs
        named = dict(zip(loss.sum_names, sums[1:].tolist(), strict=True))
        named.update(zip(loss.max_names, maxima.tolist(), strict=True))
        metrics = {
            "loss:sum": float(sums[0]),
            "tokens:sum": float(batch.lengths.sum()),
            **loss.metrics(named),
        }
        return BatchResult(
            logprobs=logprobs,
            metrics=metrics,
            plan=tokens or self.micro_batch_tokens,
            sums=batch_sums(loss, named, batch.totals, wide=bool(batch.trailing.any())),
        )

    def optim_step(self, settings: StepSettings) -> dict[str, float]:
        """Apply one step. Raises `GradientsNotFinite` on all ranks alike."""
        self.backend.sum_gradients()
        metrics = self.backend.optimizer.step(settings)
        self.backend.weights_changed()
        self.step += 1
        return metrics

    def drop_gradients(self) -> None:
        self.backend.optimizer.drop_gradients()

    def _compute_on_ranks(self, batch: Batch, plan: Sequence[RankPlan]) -> list[ShareResult]:
        """Compute this rank's share. Rank 0 gets all shares in order."""
        mine = self.backend.forward_backward(
            batch, plan[self._my_share], done=self.progress.count_tokens
        )
        numbers = np.concatenate([mine.sums, mine.maxima])
        width = numbers.nbytes
        counts = [int(sum(batch.sizes[list(part)].sum() for part in share)) for share in plan]
        together = self.control.size // len(plan)
        sizes = [0] * self.control.size
        sizes[::together] = [width + 4 * count for count in counts]
        payload = numbers.tobytes() + mine.logprobs.tobytes()
        received = self.control.gather_known(
            payload if sizes[self.control.rank] else b"", sizes=sizes
        )
        results = []
        for part in received[::together]:
            theirs = np.frombuffer(part, np.float64, count=len(numbers))
            results.append(
                ShareResult(
                    sums=theirs[: len(mine.sums)],
                    maxima=theirs[len(mine.sums) :],
                    logprobs=np.frombuffer(part, np.float32, offset=width),
                )
            )
        return results


def _entries(batch: Batch, share: RankPlan) -> Int64Array:
    datums = np.array([datum for part in share for datum in part], np.int64)
    return ranges(starts=starts_of(batch.sizes)[datums], sizes=batch.sizes[datums])
