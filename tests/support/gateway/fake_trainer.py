"""A trainer that counts instead of learning: a gRPC server of the real protos."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import numpy as np

from tandem.errors import CheckpointDamaged, InvalidRequest, OutOfMemory, TandemError
from tandem.protocol.worker import (
    OUT_OF_MEMORY_METADATA_KEY,
    SECRET_METADATA_KEY,
    TrainingSpec,
    WorkerSpec,
)
from tandem.v1 import common_pb2, trainer_pb2, trainer_pb2_grpc
from tandem.weights import Manifest, PartialVersion, checksum_file, open_version
from tandem.wire.v1 import tinker_pb2
from tests.support.gateway.fake_sleep import FakeSleep

if TYPE_CHECKING:
    from tests.support.gateway.fake_launcher import FakeLauncher


def after(history: str, kind: str, seq_id: int) -> str:
    """Return the hash of weights after one more operation."""
    return hashlib.sha256(f"{history} {kind} {seq_id}".encode()).hexdigest()


class FakeRun:
    """A run of a trainer: its state, its snapshots and the order of its operations."""

    def __init__(self, training: TrainingSpec) -> None:
        self.training = training
        self.step = 0
        self.held = 0
        self.published = ""
        self.history = ""
        self.snapshots: dict[str, trainer_pb2.AwaitSnapshotReply] = {}
        self.progress = trainer_pb2.ProgressReply()
        self.done = 0
        self._removed = False
        self._turn = asyncio.Condition()

    @property
    def is_lora(self) -> bool:
        return self.training.lora is not None

    async def wait_for_turn(self, header) -> bool:
        """Return False if the run is removed meanwhile."""
        async with self._turn:
            await self._turn.wait_for(lambda: self._removed or self.done >= header.previous_seq_id)
        return not self._removed

    async def finish(self, seq_id: int) -> None:
        async with self._turn:
            self.done = max(self.done, seq_id)
            self._turn.notify_all()

    async def remove(self) -> None:
        async with self._turn:
            self._removed = True
            self._turn.notify_all()

    def learn(self, kind: str, request) -> None:
        """Mix calls that change a real trainer's weights into the `history`, in order."""
        if kind == "forward_backward":
            message = tinker_pb2.ForwardBackwardRequest.FromString(request.payload)
            if message.forward_only:
                return
        self.history = after(self.history, kind, request.header.seq_id - 1)


class FakeTrainer(FakeSleep, trainer_pb2_grpc.TrainerServicer):
    """Applies the operations of each run in log order. `gate` holds them back while it is not set,
    and `disk_gate` the end of early publishes.

    `applied` and `requests` are those of all runs. `step`, `history` and `published` are those of
    the only run. `memory` maps a `seq_id` to the tokens that fit at once, by default 2048. Plans
    below 500 tokens always fail."""

    memory: Mapping[int, int] = {}

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__()
        self.spec = spec
        self.launcher: FakeLauncher | None = None
        self.runs = {spec.first_run or spec.run_id: FakeRun(spec.training or TrainingSpec())}
        self.applied: list[tuple[str, int]] = []
        self.requests: list[object] = []
        self.released: list[str] = []
        self.snapshot_error: TandemError | None = None
        self.restored: list[trainer_pb2.RestoreRequest] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.snapshot_gate = asyncio.Event()
        self.snapshot_gate.set()
        self.fail_with: dict[int, TandemError] = {}
        self.disk_gate = asyncio.Event()
        self.disk_gate.set()
        self.disk_error: TandemError | None = None

    @property
    def only(self) -> FakeRun:
        (run,) = self.runs.values()
        return run

    @property
    def step(self) -> int:
        return self.only.step

    @property
    def history(self) -> str:
        return self.only.history

    @property
    def published(self) -> str:
        return self.only.published

    async def _find(self, run_id: str, context) -> FakeRun:
        if run_id not in self.runs:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"it does not host the run {run_id}")
        return self.runs[run_id]

    async def _admit(self, context, run: FakeRun, header) -> TandemError | None:
        metadata = dict(context.invocation_metadata())
        assert metadata[SECRET_METADATA_KEY] == self.spec.secret
        self.check_awake()
        if not await run.wait_for_turn(header):
            await context.abort(grpc.StatusCode.NOT_FOUND, "its run was removed")
        await self.gate.wait()
        return self.fail_with.get(header.seq_id - 1)

    async def _apply(self, kind: str, run: FakeRun, request) -> None:
        self.applied.append((kind, request.header.seq_id - 1))
        self.requests.append(request)
        if kind in ("forward_backward", "optim_step", "load"):
            run.learn(kind, request)
        await run.finish(request.header.seq_id)

    async def AddRun(self, request, context):
        self.check_awake()
        await self.gate.wait()
        training = TrainingSpec.model_validate_json(request.training)
        run = self.runs.setdefault(request.run_id, FakeRun(training))
        if run.training != training:
            error = InvalidRequest(f"it hosts {request.run_id} already, with other adapters")
            return trainer_pb2.AddRunReply(failure=error.to_failure())
        return trainer_pb2.AddRunReply(about=self._describe(run))

    async def RemoveRun(self, request, context):
        if list(self.runs) == [request.run_id]:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "it is the last run")
        if (run := self.runs.pop(request.run_id, None)) is not None:
            await run.remove()
        await self.gate.wait()
        return trainer_pb2.RemoveRunReply()

    async def Describe(self, request, context):
        if not request.run_id:
            return trainer_pb2.DescribeTrainerReply(run_ids=self.runs)
        return self._describe(await self._find(request.run_id, context))

    def _describe(self, run: FakeRun) -> trainer_pb2.DescribeTrainerReply:
        return trainer_pb2.DescribeTrainerReply(
            architecture="Fake",
            parameters=7,
            trainable_parameters=7,
            ranks=1,
            last_seq_id=run.done,
            step=run.step,
            micro_batch_tokens=2048,
            run_ids=self.runs,
            shares=True,
            memory=trainer_pb2.MemoryPlan(
                micro_batch_tokens=2048,
                checkpointing=True,
                device={"weights": 3 * 2**20, "activations": 5 * 2**20},
                device_available=9 * 2**20,
            ),
        )

    async def Progress(self, request, context):
        return (await self._find(request.run_id, context)).progress

    async def ForwardBackward(self, request, context):
        run = await self._find(request.header.run_id, context)
        error = await self._admit(context, run, request.header)
        plan = request.micro_batch_tokens or 2048
        if request.out_of_memory_at:
            plan = min(plan, request.out_of_memory_at // 2)
        if request.checkpoint:
            plan = max(plan, 512)
        if plan < 500:
            error = OutOfMemory("one sequence is too long")
        elif plan > self.memory.get(request.header.seq_id - 1, 2048):
            context.set_trailing_metadata(((OUT_OF_MEMORY_METADATA_KEY, str(plan)),))
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "rank 1 ran out of memory")
        await self._apply("forward_backward", run, request)
        if error is not None:
            return trainer_pb2.ForwardBackwardReply(
                failure=error.to_failure(), out_of_memory_at=request.out_of_memory_at
            )
        message = tinker_pb2.ForwardBackwardRequest.FromString(request.payload)
        lengths = [len(d.model_input[0].encoded_text.tokens) for d in message.data]
        output = tinker_pb2.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
        record = output.loss_fn_outputs.add(num_datums=len(lengths))
        field = record.fields["logprobs"]
        field.data = np.full(sum(lengths) // 4, -1.0, np.float32).tobytes()
        field.offsets = np.cumsum([0, *lengths]).astype(np.int64).tobytes()
        field.dtype = tinker_pb2.DTYPE_FLOAT32
        if not message.forward_only:
            run.held += sum(lengths) // 4
        output.metrics["loss:sum"] = float(len(lengths))
        return trainer_pb2.ForwardBackwardReply(
            output=output.SerializeToString(),
            tokens=sum(lengths) // 4,
            seconds=0.5,
            micro_batch_tokens=plan,
            out_of_memory_at=request.out_of_memory_at,
        )

    async def OptimStep(self, request, context):
        run = await self._find(request.header.run_id, context)
        error = await self._admit(context, run, request.header)
        await self._apply("optim_step", run, request)
        if error is not None:
            return trainer_pb2.OptimStepReply(failure=error.to_failure())
        run.step += 1
        held, run.held = run.held, 0
        if request.snapshot:
            self._take_snapshot(run, request)
        return trainer_pb2.OptimStepReply(
            seconds=0.25,
            step=run.step,
            metrics={"grad_norm": 1.5},
            batch_metrics=(
                {"loss:sum": 2.0 * held / run.step, "loss": 2.0 / run.step} if held else {}
            ),
            batch_tokens=held,
            batch_seconds=0.5 * bool(held),
            weight_version=run.published,
        )

    async def Publish(self, request, context):
        run = await self._find(request.header.run_id, context)
        error = await self._admit(context, run, request.header)
        await self._apply("publish", run, request)
        if error is not None:
            return trainer_pb2.PublishReply(failure=error.to_failure())
        version = request.version
        version.step = run.step
        version.adapter = run.is_lora
        manifest = _write_version(run, version)
        run.published = version.name
        return trainer_pb2.PublishReply(
            version=version,
            bytes=manifest.bytes,
            handoff=common_pb2.Handoff(name=version.name) if request.handoff else None,
            durable=not request.early,
        )

    async def AwaitPublished(self, request, context):
        await self.disk_gate.wait()
        if self.disk_error is not None:
            return trainer_pb2.PublishReply(failure=self.disk_error.to_failure())
        size = open_version(Path(request.version.path), checksums=False).bytes
        return trainer_pb2.PublishReply(version=request.version, bytes=size, durable=True)

    async def Release(self, request, context):
        self.released.append(request.name)
        return trainer_pb2.ReleaseReply()

    def _take_snapshot(self, run: FakeRun, request) -> None:
        reply = run.snapshots[request.snapshot] = trainer_pb2.AwaitSnapshotReply(
            seq_id=request.header.seq_id, step=run.step, bytes=100, seconds=0.01
        )
        if self.snapshot_error is not None:
            reply.failure.CopyFrom(self.snapshot_error.to_failure())
            return
        folder = Path(request.snapshot)
        folder.mkdir(parents=True)
        state = {"step": run.step, "seq_id": reply.seq_id, "history": run.history}
        (folder / "checkpoint.json").write_text(json.dumps(state))

    async def AwaitSnapshot(self, request, context):
        run = await self._find(request.run_id, context)
        await self.snapshot_gate.wait()
        return run.snapshots[request.path]

    async def Restore(self, request, context):
        run = await self._find(request.run_id, context)
        await self.gate.wait()
        self.restored.append(request)
        if request.path:
            try:
                state = json.loads((Path(request.path) / "checkpoint.json").read_text())
            except ValueError as error:
                failure = CheckpointDamaged(str(error)).to_failure()
                return trainer_pb2.RestoreReply(failure=failure)
            assert state["seq_id"] == request.seq_id
            run.step = state["step"]
            run.history = state["history"]
        run.published = request.weight_version
        await run.finish(request.seq_id)
        return trainer_pb2.RestoreReply(step=run.step)

    async def SaveCheckpoint(self, request, context):
        run = await self._find(request.header.run_id, context)
        await self._admit(context, run, request.header)
        folder = Path(request.path)
        if folder.exists():  # noqa: ASYNC240 - an earlier try saved it
            (saved,) = json.loads((folder / "checkpoint.json").read_text())["files"]
            await run.finish(request.header.seq_id)
            return trainer_pb2.SaveCheckpointReply(step=run.step, bytes=saved["bytes"])
        await self._apply("save", run, request)
        folder.mkdir(parents=True)  # noqa: ASYNC240
        (folder / "rank-0-0.safetensors").write_bytes(b"state of step %d" % run.step)
        entry = checksum_file(folder / "rank-0-0.safetensors")
        record = {
            "step": run.step,
            "seq_id": request.header.seq_id,
            "history": run.history,
            "files": [entry.model_dump()],
        }
        (folder / "checkpoint.json").write_text(json.dumps(record))
        return trainer_pb2.SaveCheckpointReply(
            step=run.step, bytes=entry.bytes, at_step=not run.held
        )

    async def LoadCheckpoint(self, request, context):
        run = await self._find(request.header.run_id, context)
        error = await self._admit(context, run, request.header)
        await self._apply("load", run, request)
        if error is not None:
            return trainer_pb2.LoadCheckpointReply(failure=error.to_failure())
        record = json.loads((Path(request.path) / "checkpoint.json").read_text())
        for entry in record["files"]:
            assert checksum_file(Path(request.path) / entry["name"]).model_dump() == entry
        run.step = record["step"]
        return trainer_pb2.LoadCheckpointReply(step=run.step)


def _write_version(run: FakeRun, version) -> Manifest:
    """Write the number of steps as weights, and a manifest."""
    if Path(version.path).exists():  # an earlier trainer published it early
        return open_version(Path(version.path))
    partial = PartialVersion(Path(version.path))
    partial.create()
    names = (
        ("adapter_model.safetensors", "adapter_config.json")
        if version.adapter
        else ("model.safetensors", "config.json")
    )
    (partial.path / names[0]).write_bytes(b"weights of step %d" % run.step)
    (partial.path / names[1]).write_text('{"fake": true}')
    files = [checksum_file(partial.path / name) for name in names]
    manifest = Manifest(
        version=version.name,
        run_id=version.run_id,
        step=run.step,
        adapter=version.adapter,
        dtype="float32",
        tensors=1,
        created="2026-01-01T00:00:00+00:00",
        files=files,
    )
    partial.commit(manifest)
    return manifest


async def die(trainer: FakeTrainer, reason: str) -> None:
    """Let a trainer die in the middle of a call."""
    assert trainer.launcher is not None
    killing = asyncio.create_task(trainer.launcher.kill(trainer.spec.worker_id, reason))
    await asyncio.shield(killing)


def dies_at(seq_id: int) -> type[FakeTrainer]:
    class Fragile(FakeTrainer):
        async def ForwardBackward(self, request, context):
            if request.header.seq_id - 1 == seq_id:
                await die(self, "it ran out of memory")
            return await super().ForwardBackward(request, context)

    return Fragile
