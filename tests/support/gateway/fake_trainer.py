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

from tandem.errors import CheckpointDamaged, OutOfMemory, TandemError
from tandem.protocol.worker import OUT_OF_MEMORY_METADATA_KEY, SECRET_METADATA_KEY, WorkerSpec
from tandem.v1 import common_pb2, trainer_pb2, trainer_pb2_grpc
from tandem.weights import Manifest, PartialVersion, checksum_file
from tandem.wire.v1 import tinker_pb2
from tests.support.gateway.fake_sleep import FakeSleep

if TYPE_CHECKING:
    from tests.support.gateway.fake_launcher import FakeLauncher


def after(history: str, kind: str, seq_id: int) -> str:
    """Return the hash of weights after one more operation."""
    return hashlib.sha256(f"{history} {kind} {seq_id}".encode()).hexdigest()


class FakeTrainer(FakeSleep, trainer_pb2_grpc.TrainerServicer):
    """Applies operations in log order. `gate` holds them back while it is not set.

    `memory` maps a `seq_id` to the tokens that fit at once, by default 2048. Plans below 500 tokens
    always fail."""

    memory: Mapping[int, int] = {}

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__()
        self.spec = spec
        self.launcher: FakeLauncher | None = None
        self.applied: list[tuple[str, int]] = []
        self.requests: list[object] = []
        self.step = 0
        self.held = 0
        self.published = ""
        self.released: list[str] = []
        self.history = ""
        self.snapshots: dict[str, trainer_pb2.AwaitSnapshotReply] = {}
        self.snapshot_error: TandemError | None = None
        self.restored: list[trainer_pb2.RestoreRequest] = []
        self.progress = trainer_pb2.ProgressReply()
        self.gate = asyncio.Event()
        self.gate.set()
        self.snapshot_gate = asyncio.Event()
        self.snapshot_gate.set()
        self.fail_with: dict[int, TandemError] = {}
        self._turn = asyncio.Condition()
        self._done = 0

    async def _admit(self, context, header) -> TandemError | None:
        metadata = dict(context.invocation_metadata())
        assert metadata[SECRET_METADATA_KEY] == self.spec.secret
        self.check_awake()
        async with self._turn:
            await self._turn.wait_for(lambda: self._done >= header.previous_seq_id)
        await self.gate.wait()
        return self.fail_with.get(header.seq_id - 1)

    async def _apply(self, kind: str, request) -> None:
        self.applied.append((kind, request.header.seq_id - 1))
        self.requests.append(request)
        if kind in ("forward_backward", "optim_step", "load"):
            self._learn(kind, request)
        async with self._turn:
            self._done = request.header.seq_id
            self._turn.notify_all()

    def _learn(self, kind: str, request) -> None:
        """Mix calls that change a real trainer's weights into the `history`, in order."""
        if kind == "forward_backward":
            message = tinker_pb2.ForwardBackwardRequest.FromString(request.payload)
            if message.forward_only:
                return
        self.history = after(self.history, kind, request.header.seq_id - 1)

    async def Describe(self, request, context):
        return trainer_pb2.DescribeTrainerReply(
            architecture="Fake",
            parameters=7,
            trainable_parameters=7,
            ranks=1,
            micro_batch_tokens=2048,
            memory=trainer_pb2.MemoryPlan(
                micro_batch_tokens=2048,
                checkpointing=True,
                device={"weights": 3 * 2**20, "activations": 5 * 2**20},
                device_available=9 * 2**20,
            ),
        )

    async def Progress(self, request, context):
        return self.progress

    async def ForwardBackward(self, request, context):
        error = await self._admit(context, request.header)
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
        await self._apply("forward_backward", request)
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
            self.held += sum(lengths) // 4
        output.metrics["loss:sum"] = float(len(lengths))
        return trainer_pb2.ForwardBackwardReply(
            output=output.SerializeToString(),
            tokens=sum(lengths) // 4,
            seconds=0.5,
            micro_batch_tokens=plan,
            out_of_memory_at=request.out_of_memory_at,
        )

    async def OptimStep(self, request, context):
        error = await self._admit(context, request.header)
        await self._apply("optim_step", request)
        if error is not None:
            return trainer_pb2.OptimStepReply(failure=error.to_failure())
        self.step += 1
        held, self.held = self.held, 0
        if request.snapshot:
            self._take_snapshot(request)
        return trainer_pb2.OptimStepReply(
            seconds=0.25,
            step=self.step,
            metrics={"grad_norm": 1.5},
            batch_metrics={"loss:sum": 2.0 * held / self.step} if held else {},
            batch_tokens=held,
            batch_seconds=0.5 * bool(held),
            weight_version=self.published,
        )

    async def Publish(self, request, context):
        error = await self._admit(context, request.header)
        await self._apply("publish", request)
        if error is not None:
            return trainer_pb2.PublishReply(failure=error.to_failure())
        version = request.version
        version.step = self.step
        version.adapter = self.is_lora
        manifest = self._write_version(version, request.delta_of)
        self.published = version.name
        return trainer_pb2.PublishReply(
            version=version,
            bytes=manifest.bytes,
            written_bytes=sum(entry.bytes for entry in manifest.patches or manifest.files),
            delta_of=manifest.delta_of,
            handoff=common_pb2.Handoff(name=version.name) if request.handoff else None,
        )

    async def Release(self, request, context):
        self.released.append(request.name)
        return trainer_pb2.ReleaseReply()

    def _take_snapshot(self, request) -> None:
        reply = self.snapshots[request.snapshot] = trainer_pb2.AwaitSnapshotReply(
            seq_id=request.header.seq_id, step=self.step, bytes=100, seconds=0.01
        )
        if self.snapshot_error is not None:
            reply.failure.CopyFrom(self.snapshot_error.to_failure())
            return
        folder = Path(request.snapshot)
        folder.mkdir(parents=True)
        state = {"step": self.step, "seq_id": reply.seq_id, "history": self.history}
        (folder / "checkpoint.json").write_text(json.dumps(state))

    async def AwaitSnapshot(self, request, context):
        await self.snapshot_gate.wait()
        return self.snapshots[request.path]

    async def Restore(self, request, context):
        await self.gate.wait()
        self.restored.append(request)
        if request.path:
            try:
                state = json.loads((Path(request.path) / "checkpoint.json").read_text())
            except ValueError as error:
                failure = CheckpointDamaged(str(error)).to_failure()
                return trainer_pb2.RestoreReply(failure=failure)
            assert state["seq_id"] == request.seq_id
            self.step = state["step"]
            self.history = state["history"]
        self.published = request.weight_version
        async with self._turn:
            self._done = max(self._done, request.seq_id)
            self._turn.notify_all()
        return trainer_pb2.RestoreReply(step=self.step)

    @property
    def is_lora(self) -> bool:
        return self.spec.training is not None and self.spec.training.lora is not None

    def _write_version(self, version, delta_of: str) -> Manifest:
        """Write the number of steps as weights, and a manifest. A delta holds a three-byte
        patch."""
        partial = PartialVersion(Path(version.path))
        partial.create()
        names = (
            ("adapter_model.safetensors", "adapter_config.json")
            if version.adapter
            else ("model.safetensors", "config.json")
        )
        (partial.path / names[0]).write_bytes(b"weights of step %d" % self.step)
        (partial.path / names[1]).write_text('{"fake": true}')
        files = [checksum_file(partial.path / name) for name in names]
        patches = []
        if delta_of:
            patch = (partial.path / names[0]).rename(partial.path / f"{names[0]}.patch")
            patch.write_bytes(b"new")
            patches.append(checksum_file(patch))
        manifest = Manifest(
            version=version.name,
            run_id=version.run_id,
            step=self.step,
            adapter=version.adapter,
            delta_of=delta_of,
            patches=patches,
            dtype="float32",
            tensors=1,
            created="2026-01-01T00:00:00+00:00",
            files=files,
        )
        partial.commit(manifest)
        return manifest

    async def SaveCheckpoint(self, request, context):
        await self._admit(context, request.header)
        await self._apply("save", request)
        folder = Path(request.path)
        folder.mkdir(parents=True)  # noqa: ASYNC240
        (folder / "rank-0-0.safetensors").write_bytes(b"state of step %d" % self.step)
        entry = checksum_file(folder / "rank-0-0.safetensors")
        record = {
            "step": self.step,
            "seq_id": request.header.seq_id,
            "history": self.history,
            "files": [entry.model_dump()],
        }
        (folder / "checkpoint.json").write_text(json.dumps(record))
        return trainer_pb2.SaveCheckpointReply(
            step=self.step, bytes=entry.bytes, at_step=not self.held
        )

    async def LoadCheckpoint(self, request, context):
        error = await self._admit(context, request.header)
        await self._apply("load", request)
        if error is not None:
            return trainer_pb2.LoadCheckpointReply(failure=error.to_failure())
        record = json.loads((Path(request.path) / "checkpoint.json").read_text())
        for entry in record["files"]:
            assert checksum_file(Path(request.path) / entry["name"]).model_dump() == entry
        self.step = record["step"]
        return trainer_pb2.LoadCheckpointReply(step=self.step)


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
