"""Model workers in the gateway's process, without gRPC, for tests in virtual time.

A trainer's weights are a hash of all changes in order, so two trainers have equal weights only
after equal changes. Results show the weights."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2

from gateway.workers.launchers.base import WorkerHandle
from tandem.errors import (
    CheckpointDamaged,
    EmptyBatch,
    GradientsIncomplete,
    MalformedPayload,
    NoGradients,
    PublishFailed,
    TandemError,
    WorkerDied,
)
from tandem.protocol.worker import WorkerSpec
from tandem.v1 import common_pb2, sampler_pb2, trainer_pb2
from tandem.weights import Manifest, PartialVersion, checksum_file, open_version
from tests.support.crashing_loop import as_process

_BYTES = 100
"""The size of a snapshot or checkpoint."""
POISON = b"poison"
"""The start of a payload that kills its worker."""
LONG = b"long"
"""A payload that takes almost the allowed time begins like this."""
ENDLESS = b"endless"

FORWARD = b"forward"

UNREADABLE = b" that is no message"
"""The end of an unreadable payload."""
EMPTY = b" without a datum"
"""The end of a readable payload that is refused."""


def after(*what: object) -> str:
    """Return the hash that represents weights or gradients."""
    return hashlib.sha256("\0".join(map(str, what)).encode()).hexdigest()[:12]


@dataclass
class Misfortune:
    """The faults of workers, with limits, each with a `chance`.

    More would fail an operation: a trainer may die three times at one, an engine twice."""

    rng: random.Random
    deaths: int = 0
    engine_deaths: int = 0
    broken_connections: int = 0
    damaged_snapshots: int = 0
    chance: float = 0.02

    def strikes(self, what: str) -> bool:
        left = getattr(self, what)
        if left == 0 or self.rng.random() > self.chance:
            return False
        setattr(self, what, left - 1)
        return True

    async def delay(self, most: float) -> None:
        await asyncio.sleep(self.rng.random() * most)


class ModelWorker:
    """A started worker. Its tasks end when `died` is done.

    It serves once `serving` is set, and hangs while `frozen`."""

    def __init__(self, spec: WorkerSpec, misfortune: Misfortune) -> None:
        self.spec = spec
        self.died: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.serving = asyncio.Event()
        self.serving.set()
        self.frozen = False
        self.kill: Callable[[], None] = self.die
        self._misfortune = misfortune
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def handle(self) -> WorkerHandle:
        return WorkerHandle.of(self.spec, address=self.spec.worker_id)

    def task(self, work) -> asyncio.Task[Any]:
        """Begin work of this process, independent of the caller."""
        task = asyncio.create_task(work, context=as_process(self.spec.worker_id))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def die(self) -> None:
        if not self.died.done():
            self.died.set_result(None)
        for task in self._tasks:
            task.cancel()

    async def Check(self, request):
        status = health_pb2.HealthCheckResponse
        return status(status=status.SERVING if self.serving.is_set() else status.NOT_SERVING)


class ModelSampler(ModelWorker):
    """Has one full version and any adapters.

    For another full version, it changes when it is idle. Samples show their version and seed, and
    take `seconds`. `answered` lists the versions of ended samples. With a `failed` engine, answers
    report that and it dies."""

    failed = False

    def __init__(self, spec: WorkerSpec, misfortune: Misfortune) -> None:
        super().__init__(spec, misfortune)
        self.version = common_pb2.WeightVersion(
            name=f"base/{spec.model_name}", path=spec.model_path
        )
        self.state = sampler_pb2.SAMPLER_STATE_AWAKE
        self.adapters: list[str] = []
        self.seconds = 0.0
        self.answered: list[str] = []
        self._under_way = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._turn = asyncio.Lock()

    async def Describe(self, request):
        return sampler_pb2.DescribeSamplerReply(
            state=self.state, version=self.version, adapters=self.adapters
        )

    async def Sleep(self, request):
        self.state = sampler_pb2.SAMPLER_STATE_ASLEEP
        return common_pb2.SwitchReply()

    async def Wake(self, request):
        if self.state == sampler_pb2.SAMPLER_STATE_ASLEEP:
            self.state = sampler_pb2.SAMPLER_STATE_WAKING
            await self._misfortune.delay(1.0)
            self.state = sampler_pb2.SAMPLER_STATE_AWAKE
        return common_pb2.SwitchReply()

    async def Load(self, request):
        async with self._turn:
            await self._change_to(request.version, drain=not request.in_flight)
        if self.failed:
            return sampler_pb2.LoadReply(failure=self._fail())
        return sampler_pb2.LoadReply(version=request.version, bytes=7)

    async def Sample(self, request):
        async with self._turn:
            await self._change_to(request.version)
        self._under_way += 1
        self._idle.clear()
        try:
            await asyncio.sleep(self.seconds)
        finally:
            self._under_way -= 1
            if not self._under_way:
                self._idle.set()
        if self.failed:
            return sampler_pb2.SampleReply(failure=self._fail())
        self.answered.append(request.version.name)
        tokens = after(request.version.name, request.prompt_tokens, request.params.seed)
        return sampler_pb2.SampleReply(response=tokens.encode(), version=request.version)

    def _fail(self) -> common_pb2.Failure:
        asyncio.get_running_loop().call_later(1.0, self.kill)
        return WorkerDied("the engine failed: its process was killed by signal 9").to_failure()

    async def _change_to(self, version: common_pb2.WeightVersion, *, drain: bool = True) -> None:
        assert self.state != sampler_pb2.SAMPLER_STATE_ASLEEP, "it was called while asleep"
        if version.name in (self.version.name, *self.adapters):
            return
        open_version(Path(version.path), name=version.name)
        if drain and not version.adapter:
            await self._idle.wait()
        self.state = sampler_pb2.SAMPLER_STATE_LOADING
        await self._misfortune.delay(2.0)
        self.state = sampler_pb2.SAMPLER_STATE_AWAKE
        if version.adapter:
            self.adapters.append(version.name)
        else:
            self.version = version


@dataclass
class State:
    weights: str = "base"
    step: int = 0


@dataclass
class Held(State):
    """A state with gradients, and the reason why they are incomplete."""

    gradients: str = ""
    refused: str = ""
    published: str = ""
    changed: int = 0
    applied: list[int] = field(default_factory=list)


class ModelTrainer(ModelWorker):
    """Hosts runs, and computes one operation at a time."""

    def __init__(self, spec: WorkerSpec, misfortune: Misfortune) -> None:
        super().__init__(spec, misfortune)
        self.runs = {spec.first_run or spec.run_id: ModelRun(self, misfortune)}
        self.engine = asyncio.Lock()
        self.unsynced: set[Path] = set()

    def die(self) -> None:
        """Its machine loses power, and the files that are not synced."""
        for path in self.unsynced:
            shutil.rmtree(path, ignore_errors=True)
        self.unsynced.clear()
        super().die()

    def __getattr__(self, name: str) -> Callable[[Any], Awaitable[Any]]:
        async def call(request):
            run_id = request.header.run_id if hasattr(request, "header") else request.run_id
            if run_id not in self.runs:
                raise broken(grpc.StatusCode.NOT_FOUND)
            return await getattr(self.runs[run_id], name)(request)

        return call

    async def AddRun(self, request):
        async with self.engine:
            await self._misfortune.delay(1.0)
            added = self.runs.setdefault(request.run_id, ModelRun(self, self._misfortune))
            assert added.fresh, "what an earlier gateway has added is not as it was then"
        return trainer_pb2.AddRunReply()

    async def RemoveRun(self, request):
        if list(self.runs) == [request.run_id]:  # another one's AddRun may not have arrived
            raise broken(grpc.StatusCode.FAILED_PRECONDITION)
        async with self.engine:
            await self._misfortune.delay(1.0)
            self.runs.pop(request.run_id, None)
        return trainer_pb2.RemoveRunReply()

    async def Sleep(self, request):
        return common_pb2.SwitchReply()

    async def Wake(self, request):
        return common_pb2.SwitchReply()

    async def Describe(self, request):
        if not request.run_id:
            return trainer_pb2.DescribeTrainerReply(run_ids=self.runs)
        async with self.engine:
            if request.run_id not in self.runs:
                raise broken(grpc.StatusCode.NOT_FOUND)
            about = trainer_pb2.DescribeTrainerReply(
                architecture="Model",
                parameters=7,
                trainable_parameters=7,
                ranks=1,
                dtype="bfloat16",
                run_ids=self.runs,
            )
            self.runs[request.run_id].describe(about)
        return about


class ModelRun:
    """Applies each operation once, in order, like the real one."""

    def __init__(self, trainer: ModelTrainer, misfortune: Misfortune) -> None:
        self.state = Held()
        self.task = trainer.task
        self._trainer = trainer
        training = trainer.spec.training
        self._trains_adapter = training is not None and training.lora is not None
        self._misfortune = misfortune
        self._replies: dict[int, asyncio.Task[Any]] = {}
        self._snapshots: dict[str, asyncio.Task[trainer_pb2.AwaitSnapshotReply]] = {}
        self._turn = asyncio.Condition()
        self._queued = self._done = self._at = 0

    async def _in_order(self, request, apply: Callable[[Any], Any]):
        """Return an operation's reply. Applies it unless that was done before."""
        seq_id = request.header.seq_id
        if seq_id not in self._replies:
            assert seq_id > self._done, f"{seq_id} is applied a second time"
            self._replies[seq_id] = self.task(self._apply(request, apply))
        return await asyncio.shield(self._replies[seq_id])

    async def _apply(self, request, apply: Callable[[Any], Any]):
        header = request.header
        async with self._turn:
            await self._turn.wait_for(lambda: self._queued >= header.previous_seq_id)
            self._queued = max(self._queued, header.seq_id)
            self._turn.notify_all()
        async with self._trainer.engine:  # in the order of arrival, over all runs
            self._at = header.seq_id
            await self._misfortune.delay(2.0)
            assert self._done == header.previous_seq_id or header.seq_id > self._done
            self.state.refused = header.gradients_incomplete or self.state.refused
            try:
                reply = await apply(request)
            finally:
                self._at = 0
        self.state.applied.append(header.seq_id - 1)
        self._done = header.seq_id
        return reply

    @property
    def fresh(self) -> bool:
        return not self._replies and not self._done

    def describe(self, about: trainer_pb2.DescribeTrainerReply) -> None:
        about.last_seq_id, about.step = self._done, self.state.step

    async def Progress(self, request):
        return trainer_pb2.ProgressReply(seq_id=self._at)

    async def ForwardBackward(self, request):
        return await self._in_order(request, self._forward_backward)

    async def _forward_backward(self, request):
        state, payload = self.state, request.payload
        if payload.startswith(POISON):
            self._trainer.kill()
            await asyncio.Event().wait()
        if payload.startswith(LONG):
            await asyncio.sleep(1500)
        if payload.startswith(ENDLESS):
            await asyncio.Event().wait()
        error: TandemError | None = None
        if payload.endswith(UNREADABLE):
            error = MalformedPayload("the payload cannot be read")
        elif payload.endswith(EMPTY):
            error = EmptyBatch("there is no datum")
        if error is not None:
            if not payload.startswith(FORWARD):
                state.refused = error.message
            return trainer_pb2.ForwardBackwardReply(failure=error.to_failure())
        result = after(state.weights, hashlib.sha256(payload).hexdigest())
        if not payload.startswith(FORWARD):
            state.gradients = result = after(state.gradients, result)
        return trainer_pb2.ForwardBackwardReply(
            output=result.encode(), seconds=self._misfortune.rng.random(), tokens=1
        )

    async def OptimStep(self, request):
        return await self._in_order(request, self._optim_step)

    async def _optim_step(self, request):
        state = self.state
        gradients, refused = state.gradients, state.refused
        state.gradients = state.refused = ""
        if refused or not gradients:
            error = GradientsIncomplete(refused) if refused else NoGradients("there are none")
            return trainer_pb2.OptimStepReply(failure=error.to_failure(), step=state.step)
        state.weights = after(state.weights, gradients, request.adamw.learning_rate)
        state.step += 1
        state.changed = request.header.seq_id
        if request.snapshot:
            copy = State(state.weights, state.step)
            writing = self._write_snapshot(request.snapshot, copy, request.header.seq_id)
            self._snapshots[request.snapshot] = self.task(writing)
        return trainer_pb2.OptimStepReply(
            seconds=self._misfortune.rng.random(),
            step=state.step,
            metrics={"weights": float(int(state.weights, 16))},
            batch_tokens=1,
            weight_version=state.published,
        )

    async def _write_snapshot(self, folder: str, state: State, seq_id: int):
        try:
            spoiled = self._misfortune.strikes("damaged_snapshots")
            await self._write(Path(folder), state, spoiled=spoiled)
        except OSError as error:  # the gateway abandoned it
            failure = PublishFailed(str(error)).to_failure()
            return trainer_pb2.AwaitSnapshotReply(failure=failure)
        return trainer_pb2.AwaitSnapshotReply(
            seq_id=seq_id, step=state.step, bytes=_BYTES, seconds=0.01
        )

    async def _write(
        self, path: Path, state: State, *, operation: str = "", spoiled: bool = False
    ) -> None:
        """Write a state to disk, and name it once it is complete."""
        partial = path.parent / f".partial-{path.name}"
        shutil.rmtree(partial, ignore_errors=True)  # left by a trainer that died
        partial.mkdir(parents=True)
        await self._misfortune.delay(1.0)
        (partial / "state").write_text(json.dumps(asdict(state)))
        await self._misfortune.delay(1.0)
        files = [checksum_file(partial / "state").model_dump()]
        record = json.dumps({"step": state.step, "operation": operation, "files": files})
        (partial / "checkpoint.json").write_text("spoiled" if spoiled else record)
        partial.rename(path)

    async def TakeSnapshot(self, request):
        copy = State(self.state.weights, self.state.step)
        writing = self._write_snapshot(request.path, copy, self.state.changed)
        self._snapshots[request.path] = self.task(writing)
        return await self.AwaitSnapshot(request)

    async def AwaitSnapshot(self, request):
        if request.path not in self._snapshots:
            failure = PublishFailed("no such snapshot was asked for").to_failure()
            return trainer_pb2.AwaitSnapshotReply(failure=failure)
        return await asyncio.shield(self._snapshots[request.path])

    def _read(self, folder: str) -> State:
        path = Path(folder)
        try:
            json.loads((path / "checkpoint.json").read_text())
            return State(**json.loads((path / "state").read_text()))
        except ValueError as error:
            raise CheckpointDamaged(str(error)) from error

    async def Restore(self, request):
        if request.path and not all(reply.done() for reply in self._replies.values()):
            raise broken(grpc.StatusCode.FAILED_PRECONDITION)
        async with self._trainer.engine:
            await self._misfortune.delay(1.0)
            if request.path:
                try:
                    found = self._read(request.path)
                except TandemError as error:
                    return trainer_pb2.RestoreReply(failure=error.to_failure())
                self.state = Held(found.weights, found.step, changed=request.seq_id)
            self.state.published = request.weight_version
        async with self._turn:
            self._queued = self._done = max(self._done, request.seq_id)
            self._turn.notify_all()
        return trainer_pb2.RestoreReply(step=self.state.step)

    async def Publish(self, request):
        return await self._in_order(request, self._publish)

    async def _publish(self, request):
        version, state = request.version, self.state
        version.step, version.adapter = state.step, self._trains_adapter
        path, operation = Path(version.path), request.header.operation_id
        if not path.is_dir():  # noqa: ASYNC240
            partial = PartialVersion(path)
            partial.discard()  # left by a trainer that died during its writing
            partial.create()
            await self._misfortune.delay(1.0)
            file = partial.path / "model.safetensors"
            file.write_text(state.weights)
            await self._misfortune.delay(1.0)
            manifest = Manifest(
                version=version.name,
                run_id=version.run_id,
                step=state.step,
                operation=operation,
                dtype="float32",
                tensors=1,
                created="2026-01-01T00:00:00+00:00",
                files=[checksum_file(file)],
            )
            partial.commit(manifest)
        elif open_version(path).operation != operation:
            return trainer_pb2.PublishReply(failure=PublishFailed("it exists").to_failure())
        state.published = version.name
        if request.early:
            self._trainer.unsynced.add(path)
        return trainer_pb2.PublishReply(version=version, bytes=12, durable=not request.early)

    async def AwaitPublished(self, request):
        path = Path(request.version.path)
        if not path.is_dir():  # noqa: ASYNC240
            failure = PublishFailed("it was not published").to_failure()
            return trainer_pb2.PublishReply(failure=failure)
        await self._misfortune.delay(3.0)
        self._trainer.unsynced.discard(path)
        return trainer_pb2.PublishReply(version=request.version, bytes=12, durable=True)

    async def SaveCheckpoint(self, request):
        return await self._in_order(request, self._save)

    async def _save(self, request):
        state, path = State(self.state.weights, self.state.step), Path(request.path)
        operation = request.header.operation_id
        if not path.is_dir():  # noqa: ASYNC240
            await self._write(path, state, operation=operation)
        elif json.loads((path / "checkpoint.json").read_text())["operation"] != operation:
            return trainer_pb2.SaveCheckpointReply(failure=PublishFailed("").to_failure())
        return trainer_pb2.SaveCheckpointReply(
            step=state.step,
            bytes=_BYTES,
            at_step=not self.state.gradients and not self.state.refused,
        )

    async def LoadCheckpoint(self, request):
        return await self._in_order(request, self._load)

    async def _load(self, request):
        found, published = self._read(request.path), self.state.published
        weights = found.weights if request.optimizer else after(found.weights, "a new optimizer")
        changed, applied = request.header.seq_id, self.state.applied
        self.state = Held(
            weights, found.step, published=published, changed=changed, applied=applied
        )
        return trainer_pb2.LoadCheckpointReply(step=found.step)


def broken(code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE) -> grpc.aio.AioRpcError:
    nothing = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(code, nothing, nothing, "the connection broke")
