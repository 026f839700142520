"""The operations of a run: on rank 0 (`Operations`) and on the other ranks (`Follower`).

Rank 0 checks an operation before it announces it, so a refused one changes nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
from google.protobuf.message import Message

from tandem.backends.memory import MemoryPlan
from tandem.errors import (
    GradientsIncomplete,
    GradientsNotFinite,
    NoGradients,
    OutOfMemory,
    TandemError,
    UserError,
)
from tandem.v1 import common_pb2, trainer_pb2
from tandem.weights.state_record import CheckpointRecord
from tandem.wire.v1 import tinker_pb2 as wire
from trainer_service.backends.base import Capability
from trainer_service.batches.loss_inputs import Float32Array
from trainer_service.batches.staleness import FreshBatch, without_stale
from trainer_service.batches.validation import Batch, BatchLimits, is_forward, parse, validate
from trainer_service.checkpoints import training_state
from trainer_service.checkpoints.publish import publish
from trainer_service.checkpoints.snapshots import Snapshots, snapshot_thread
from trainer_service.checkpoints.version_requests import VersionRequest
from trainer_service.compute.control_group import Op
from trainer_service.compute.device_memory import device_peaks
from trainer_service.compute.trainer import BatchResult, RankTrainer
from trainer_service.losses.numbers import step_numbers
from trainer_service.optimizers import step_settings
from trainer_service.service.publisher import Publisher
from trainer_service.service.switching import Switching


@dataclass
class HeldBatches:
    """The batches with held gradients. `tokens` and `seconds` are their sums. `sums` are for
    `step_numbers`."""

    metrics: dict[str, float] = field(default_factory=dict)
    sums: dict[str, float] = field(default_factory=dict)
    tokens: int = 0
    seconds: float = 0.0

    def add_batch(
        self,
        metrics: Mapping[str, float],
        *,
        tokens: int,
        seconds: float,
        sums: Mapping[str, float],
    ) -> None:
        """Combine metrics by the suffix of their name, or else by the mean over tokens."""
        share = tokens / max(1, self.tokens + tokens)
        _combine(self.metrics, metrics, share=share)
        _combine(self.sums, sums, share=share)
        self.tokens += tokens
        self.seconds += seconds

    def as_metrics(self) -> dict[str, float]:
        """Return the metrics, and the numbers of a step with these batches."""
        return self.metrics | step_numbers(self.sums)


def _combine(combined: dict[str, float], more: Mapping[str, float], *, share: float) -> None:
    for name, value in more.items():
        before = combined.get(name)
        if before is None:
            combined[name] = value
        elif name.endswith(":sum"):
            combined[name] = before + value
        elif name.endswith((":max", ":min")):
            combined[name] = (max if name.endswith(":max") else min)(before, value)
        else:
            combined[name] = before + (value - before) * share


class Operations:
    """A run's operations on rank 0, in the engine thread.

    `_held` describes the batches with held gradients, if any. `_refused` is the reason if these are
    incomplete: a step then drops them, and a load clears both. `_changed` is the newest step or
    load."""

    def __init__(
        self,
        trainer: RankTrainer,
        *,
        thread: ThreadPoolExecutor | None = None,
        switching: Switching | None = None,
    ) -> None:
        self.trainer = trainer
        self.snapshots = Snapshots(trainer, thread=thread or snapshot_thread())
        self.switching = switching or Switching(trainer.control, lambda: [trainer.backend])
        self.progress = trainer.progress
        self._held: HeldBatches | None = None
        self._refused = ""
        self.publisher = Publisher(trainer)
        self._changed = common_pb2.OperationHeader()

    def note_refused(self, reason: str) -> None:
        """Note why a forward_backward was refused elsewhere, unless `reason` is empty."""
        self._refused = reason or self._refused

    def describe(self) -> trainer_pb2.DescribeTrainerReply:
        trainer = self.trainer
        facts = trainer.backend.facts
        peaks = device_peaks(trainer.backend.device)
        return trainer_pb2.DescribeTrainerReply(
            architecture=facts.architecture,
            parameters=facts.parameters,
            ranks=trainer.control.size,
            dtype=trainer.backend.dtype,
            device=trainer.backend.device,
            step=trainer.step,
            trainable_parameters=facts.trainable_parameters,
            micro_batch_tokens=trainer.micro_batch_tokens,
            asleep=self.switching.asleep,
            memory=_memory(trainer.backend.plan),
            shares=Capability.ADAPTERS in trainer.backend.capabilities,
            packs=trainer.backend.packs,
            peak_allocated_bytes=peaks[0],
            peak_reserved_bytes=peaks[1],
        )

    def _announce(self, op: Op, message: Message | None = None) -> None:
        """Announce an operation to the other ranks. The servicer has made sure they are awake."""
        assert not self.switching.asleep, f"{op.name} while the trainer is asleep"
        self.trainer.control.broadcast(op, message)

    def read_batch(self, request: trainer_pb2.ForwardBackwardRequest) -> Batch:
        """Read the batch of a request, from any thread, before its turn. Raises a `UserError`."""
        return _read_batch(request, self.trainer)

    def forward_backward(
        self,
        request: trainer_pb2.ForwardBackwardRequest,
        read: Callable[[], Batch] | None = None,
    ) -> trainer_pb2.ForwardBackwardReply:
        """`read`, if the batch was read ahead, returns it or raises as `read_batch`."""
        trainer, began = self.trainer, time.perf_counter()
        try:
            whole = self.read_batch(request) if read is None else read()
            fresh = without_stale(whole, step=trainer.step)
            batch = fresh.batch
            request.micro_batch_tokens = self._plan(batch, request)  # all ranks use the same plan
            self._announce(Op.FORWARD_BACKWARD, request)
            if not batch.forward_only:
                self._held = self._held or HeldBatches()
            # A loss may fail on its datums.
            computed = trainer.forward_backward(
                batch,
                plan=request.micro_batch_tokens,
                out_of_memory_at=request.out_of_memory_at,
            )
        except (UserError, OutOfMemory) as error:
            if not is_forward(request.payload):
                self._refused = error.message
            return trainer_pb2.ForwardBackwardReply(
                failure=error.to_failure(),
                out_of_memory_at=error.tokens if isinstance(error, OutOfMemory) else 0,
            )
        assert computed is not None
        return self.reply_of(request, fresh, computed, seconds=time.perf_counter() - began)

    def reply_of(
        self,
        request: trainer_pb2.ForwardBackwardRequest,
        fresh: FreshBatch,
        computed: BatchResult,
        *,
        seconds: float,
    ) -> trainer_pb2.ForwardBackwardReply:
        """Note a computed batch, and return its reply."""
        batch, tokens = fresh.batch, len(fresh.batch.tokens)
        if fresh.bounded:
            computed.metrics["dropped_stale:sum"] = float(fresh.dropped)
        if not batch.forward_only:
            self._held = self._held or HeldBatches()
            self._held.add_batch(
                computed.metrics, tokens=tokens, seconds=seconds, sums=computed.sums
            )
        return trainer_pb2.ForwardBackwardReply(
            output=encode_output(
                fresh.whole,
                logprobs=fresh.logprobs_of_whole(computed.logprobs),
                metrics=computed.metrics,
            ),
            dropped_stale=fresh.dropped,
            seconds=seconds,
            tokens=tokens,
            micro_batch_tokens=computed.plan,
            out_of_memory_at=request.out_of_memory_at,
        )

    def _plan(self, batch: Batch, request: trainer_pb2.ForwardBackwardRequest) -> int:
        """Raises `OutOfMemory` if even the smallest micro-batch is known to be too large."""
        plan = request.micro_batch_tokens or self.trainer.micro_batch_tokens
        if not request.out_of_memory_at:
            return plan
        after = self.trainer.plan_after(
            batch, tokens=request.out_of_memory_at, checkpoint=request.checkpoint
        )
        return min(plan, after)

    def optim_step(self, request: trainer_pb2.OptimStepRequest) -> trainer_pb2.OptimStepReply:
        trainer, began = self.trainer, time.perf_counter()
        try:
            settings = step_settings(request, optimizer=trainer.backend.training.optimizer)
            if refused := self._refused:
                self._drop_gradients()
                raise GradientsIncomplete(
                    "a forward_backward since the last step was refused, so the step was not "
                    f"made and the gradients were dropped: {refused}. Send the batches again, "
                    "then the step"
                )
            if self._held is None:
                raise NoGradients(
                    "there are no gradients: no forward_backward came since the last optim_step; "
                    "send one first"
                )
            request.snapshot = self.snapshots.prepare(request.snapshot)
            self._announce(Op.OPTIM_STEP, request)
            held, self._held = self._held, None
            try:
                metrics = trainer.optim_step(settings)
            except GradientsNotFinite:
                self.snapshots.abandon(request.snapshot)
                raise
        except TandemError as error:
            return trainer_pb2.OptimStepReply(failure=error.to_failure(), step=trainer.step)
        seconds = time.perf_counter() - began
        self._changed = request.header
        self.snapshots.take_snapshot(request.snapshot, request.header)
        return trainer_pb2.OptimStepReply(
            metrics=metrics,
            step=trainer.step,
            seconds=seconds,
            batch_metrics=held.as_metrics(),
            batch_tokens=held.tokens,
            batch_seconds=held.seconds,
            weight_version=self.publisher.newest,
        )

    def publish(self, request: trainer_pb2.PublishRequest) -> trainer_pb2.PublishReply:
        return self.publisher.publish(
            request, announce=partial(self._announce, Op.PUBLISH, request)
        )

    def save_checkpoint(
        self, request: trainer_pb2.SaveCheckpointRequest
    ) -> trainer_pb2.SaveCheckpointReply:
        trainer, began = self.trainer, time.perf_counter()
        try:
            record = training_state.saved_by(request)
            if record is None:
                training_state.prepare_save(Path(request.path), trainer.backend)
                self._announce(Op.SAVE_CHECKPOINT, request)
                record = training_state.save(request, trainer)
        except TandemError as error:
            return trainer_pb2.SaveCheckpointReply(failure=error.to_failure())
        assert record is not None
        return trainer_pb2.SaveCheckpointReply(
            step=record.step,
            bytes=record.bytes,
            seconds=time.perf_counter() - began,
            at_step=self._held is None and not self._refused,
        )

    def load_checkpoint(
        self, request: trainer_pb2.LoadCheckpointRequest
    ) -> trainer_pb2.LoadCheckpointReply:
        """Held gradients are dropped."""
        began = time.perf_counter()
        try:
            self._load(Path(request.path), optimizer=request.optimizer)
        except TandemError as error:
            return trainer_pb2.LoadCheckpointReply(
                failure=error.to_failure(), step=self.trainer.step
            )
        self._changed = request.header
        return trainer_pb2.LoadCheckpointReply(
            step=self.trainer.step, seconds=time.perf_counter() - began
        )

    def take_snapshot(self, request: trainer_pb2.TakeSnapshotRequest) -> None:
        request.header.CopyFrom(self._changed)
        if self.snapshots.prepare(request.path):
            self._announce(Op.SNAPSHOT, request)
            self.snapshots.take_snapshot(request.path, request.header)

    def restore(self, request: trainer_pb2.RestoreRequest) -> trainer_pb2.RestoreReply:
        """Load a snapshot, if one is named, and take over its plan if that is smaller.

        Replayed versions are not published again, so the request names the newest."""
        began, trainer = time.perf_counter(), self.trainer
        if request.path:
            try:
                record = self._load(Path(request.path), optimizer=True)
            except TandemError as error:
                return trainer_pb2.RestoreReply(failure=error.to_failure())
            self._changed = common_pb2.OperationHeader(run_id=record.run_id, seq_id=request.seq_id)
            plan = record.micro_batch_tokens or trainer.micro_batch_tokens
            trainer.micro_batch_tokens = min(plan, trainer.micro_batch_tokens)
        self.publisher.newest = request.weight_version
        return trainer_pb2.RestoreReply(step=trainer.step, seconds=time.perf_counter() - began)

    def _load(self, path: Path, *, optimizer: bool) -> CheckpointRecord:
        trainer = self.trainer
        record = training_state.check(path, trainer, optimizer=optimizer)
        request = trainer_pb2.LoadCheckpointRequest(path=str(path), optimizer=optimizer)
        self._announce(Op.LOAD_CHECKPOINT, request)
        training_state.load(path, trainer, optimizer=optimizer)
        self._held, self._refused = None, ""
        return record

    def _drop_gradients(self) -> None:
        self._announce(Op.DROP_GRADIENTS)
        self.trainer.drop_gradients()
        self._held, self._refused = None, ""


def _memory(plan: MemoryPlan | None) -> trainer_pb2.MemoryPlan | None:
    if plan is None:
        return None
    return trainer_pb2.MemoryPlan(
        micro_batch_tokens=plan.micro_batch_tokens,
        checkpointing=plan.checkpointing,
        device=plan.device,
        host=plan.host,
        device_available=plan.available.device,
        host_available=plan.available.host,
    )


class Follower:
    """A run's operations on a rank other than 0, which rank 0 has checked."""

    def __init__(self, trainer: RankTrainer, *, thread: ThreadPoolExecutor) -> None:
        self.trainer = trainer
        self.snapshots = Snapshots(trainer, thread=thread)

    def apply(self, op: Op, payload: bytes) -> None:
        trainer = self.trainer
        if op == Op.FORWARD_BACKWARD:
            request = trainer_pb2.ForwardBackwardRequest.FromString(payload)
            batch = _read_batch(request, trainer)
            trainer.forward_backward(
                without_stale(batch, step=trainer.step).batch,
                plan=request.micro_batch_tokens,
                out_of_memory_at=request.out_of_memory_at,
            )
        elif op == Op.OPTIM_STEP:
            self._optim_step(trainer_pb2.OptimStepRequest.FromString(payload))
        elif op == Op.SNAPSHOT:
            taken = trainer_pb2.TakeSnapshotRequest.FromString(payload)
            self.snapshots.take_snapshot(taken.path, taken.header)
        elif op == Op.DROP_GRADIENTS:
            trainer.drop_gradients()
        elif op == Op.PUBLISH:
            version = trainer_pb2.PublishRequest.FromString(payload)
            named = VersionRequest.from_message(version, step=trainer.step)
            publish(named, trainer, early=version.early)
        elif op == Op.SAVE_CHECKPOINT:
            training_state.save(trainer_pb2.SaveCheckpointRequest.FromString(payload), trainer)
        elif op == Op.VERIFY_CHECKPOINT:
            checked = trainer_pb2.LoadCheckpointRequest.FromString(payload)
            training_state.verify(Path(checked.path), trainer)
        elif op == Op.LOAD_CHECKPOINT:
            load = trainer_pb2.LoadCheckpointRequest.FromString(payload)
            training_state.load(Path(load.path), trainer, optimizer=load.optimizer)

    def _optim_step(self, step: trainer_pb2.OptimStepRequest) -> None:
        trainer = self.trainer
        try:
            trainer.optim_step(step_settings(step, optimizer=trainer.backend.training.optimizer))
        except GradientsNotFinite:
            return  # raised on all ranks alike, and rank 0 tells the client
        self.snapshots.take_snapshot(step.snapshot, step.header)


def _read_batch(request: trainer_pb2.ForwardBackwardRequest, trainer: RankTrainer) -> Batch:
    facts = trainer.backend.facts
    return validate(
        parse(request.payload),
        limits=BatchLimits(vocabulary=facts.vocabulary, max_length=facts.max_length),
        definition=request.loss_definition,
    )


def encode_output(batch: Batch, *, logprobs: Float32Array, metrics: Mapping[str, float]) -> bytes:
    """The client's `ForwardBackwardOutput`, with each datum's part of `logprobs` [E] in its
    targets' shape.

    A record holds several datums with one trailing shape, so a new record begins where K changes.
    """
    output = wire.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics=metrics)
    ends = np.cumsum(batch.sizes)
    changes = np.flatnonzero(np.diff(batch.trailing)) + 1
    bounds = [0, *changes.tolist(), len(ends)]
    for first, last in pairwise(bounds):
        start = int(ends[first - 1]) if first else 0
        offsets = np.concatenate([[0], ends[first:last] - start]).astype("<i8") * 4
        width = int(batch.trailing[first])
        record = output.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=last - first)
        field = record.fields["logprobs"]
        field.data = logprobs[start : int(ends[last - 1])].astype("<f4", copy=False).tobytes()
        field.offsets = offsets.tobytes()
        field.dtype = wire.DTYPE_FLOAT32
        if width:
            field.trailing_shape.append(width)
    return output.SerializeToString()
