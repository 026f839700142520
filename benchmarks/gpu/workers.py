"""Real trainers and engines of random weights on one device, called as a gateway calls them."""

from __future__ import annotations

import asyncio
import copy
import shutil
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import grpc.aio
import numpy as np
import psutil
from numpy.typing import NDArray

from benchmarks.gpu.sizes import Int64Array, is_large, sequences_of
from tandem.agent.host import Accelerator
from tandem.agent.launcher import ProcessLauncher
from tandem.protocol.channels import plain_channel
from tandem.protocol.devices import confine, parse_device
from tandem.protocol.fencing import LEASE_METADATA_KEY
from tandem.protocol.worker import (
    GRPC_OPTIONS,
    SECRET_METADATA_KEY,
    TrainingSpec,
    WorkerHandle,
    WorkerSpec,
)
from tandem.protocol.worker_health import wait_until_serving
from tandem.settings.workers import TrainerSettings
from tandem.v1 import common_pb2, sampler_pb2, sampler_pb2_grpc, trainer_pb2, trainer_pb2_grpc
from tandem.weights import new_version_name, version_path
from tandem.wire.v1 import tinker_pb2 as wire

MODEL = "bench/gpu"
SESSION = "s-benchmark"
RUN = f"{SESSION}:train:0"
CALL_SECONDS = 600.0
LEARNING_RATE = 1e-5
_SECRET = "of the benchmark"
Float32Array = NDArray[np.float32]
P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class Bench:
    """`steps` are those of each of two experiments. `gpu` None: on the cores. `say` prints
    progress. `until` ends the asynchronous work of a part, by the monotonic clock."""

    work: Path
    device: str
    gpu: Accelerator | None
    rounds: int
    steps: int
    say: Callable[[str], None]
    until: float | None = None

    @property
    def left(self) -> float | None:
        """The seconds until a part's end."""
        return None if self.until is None else max(0.0, self.until - time.monotonic())

    def run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine. Raises `TimeoutError`."""

        async def limited() -> T:
            async with asyncio.timeout(self.left):
                return await work()

        return asyncio.run(limited())

    def used_bytes(self, pid: int) -> int:
        """Return the used bytes of the whole GPU, or, on a CPU, a worker's resident memory."""
        if self.gpu is None:
            own = psutil.Process(pid)
            return sum(each.memory_info().rss for each in [own, *own.children(recursive=True)])
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(self.gpu.index)
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)


def attempt(
    bench: Bench, work: Callable[P, dict[str, object]], /, *args: P.args, **kwargs: P.kwargs
) -> dict[str, object]:
    """Return the measurement, or the failure, so that earlier results stay."""
    try:
        return work(*args, **kwargs)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - recorded as the result
        failure = f"{type(error).__name__}: {error}"
        bench.say(failure)
        return {"failed": failure}


def elsewhere(bench: Bench, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Run a function in a separate process on the device, which then frees its memory.

    Raises `TimeoutError` at the part's end, and then the process is gone."""
    context, device = get_context("spawn"), parse_device(bench.device)
    with ProcessPoolExecutor(1, context, initializer=confine, initargs=(device,)) as pool:
        try:
            return pool.submit(work, *args, **kwargs).result(bench.left)
        except TimeoutError:
            for process in active_children():  # the pool would wait for it
                process.kill()
            raise


class Caller:
    """Calls one worker. Each Sleep and Wake, and every call after it, has a newer fencing token."""

    def __init__(
        self, channel: grpc.aio.Channel, *, spec: WorkerSpec, handle: WorkerHandle
    ) -> None:
        trainer = spec.kind == "trainer"
        stub = trainer_pb2_grpc.TrainerStub if trainer else sampler_pb2_grpc.SamplerStub
        self._stub: Any = stub(channel)
        self._token, self._operations = 1, 0
        self.run_id = RUN
        self.pid, self.log_path = handle.pid, Path(handle.log_path)

    async def add_run(self, number: int, training: TrainingSpec) -> Caller:
        """Let a trainer host a further run. Return its caller, for operations only."""
        other = copy.copy(self)
        other.run_id, other._operations = f"{SESSION}:train:{number}", 0
        request = trainer_pb2.AddRunRequest(
            run_id=other.run_id, training=training.model_dump_json()
        )
        await self.call("AddRun", request)
        return other

    async def call(self, method: str, request: object) -> Any:
        """Raises `RuntimeError` for a failure."""
        metadata = ((SECRET_METADATA_KEY, _SECRET), (LEASE_METADATA_KEY, str(self._token)))
        reply = await getattr(self._stub, method)(request, metadata=metadata, timeout=CALL_SECONDS)
        if reply.HasField("failure"):
            raise RuntimeError(f"{method}: {reply.failure.message}")
        return reply

    async def sample(
        self, requests: Sequence[sampler_pb2.SampleRequest]
    ) -> list[sampler_pb2.SampleReply]:
        """Return a sampler's replies, in order, to requests sent at once. Raises as `call`."""
        for number, request in enumerate(requests):
            request.number = number
        metadata = ((SECRET_METADATA_KEY, _SECRET), (LEASE_METADATA_KEY, str(self._token)))
        sent = iter([sampler_pb2.SampleRequests(requests=requests)])
        found: dict[int, sampler_pb2.SampleReply] = {}
        async for batch in self._stub.Sample(sent, metadata=metadata, timeout=CALL_SECONDS):
            for reply in batch.replies:
                if reply.HasField("failure"):
                    raise RuntimeError(f"Sample: {reply.failure.message}")
                found[reply.number] = reply
        return [found[number] for number in range(len(requests))]

    async def switch(
        self, request: common_pb2.SleepRequest | common_pb2.WakeRequest
    ) -> common_pb2.SwitchReply:
        self._token += 1
        method = "Sleep" if isinstance(request, common_pb2.SleepRequest) else "Wake"
        reply: common_pb2.SwitchReply = await self.call(method, request)
        return reply

    async def describe(self) -> trainer_pb2.DescribeTrainerReply:
        request = trainer_pb2.DescribeTrainerRequest(run_id=self.run_id)
        metadata = ((SECRET_METADATA_KEY, _SECRET),)
        about: trainer_pb2.DescribeTrainerReply = await self._stub.Describe(
            request, metadata=metadata, timeout=CALL_SECONDS
        )
        return about

    async def release(self, version: common_pb2.WeightVersion) -> None:
        """Make a trainer free its copy of a version."""
        request = trainer_pb2.ReleaseRequest(run_id=RUN, name=version.name)
        metadata = ((SECRET_METADATA_KEY, _SECRET), (LEASE_METADATA_KEY, str(self._token)))
        await self._stub.Release(request, metadata=metadata, timeout=CALL_SECONDS)

    def header(self) -> common_pb2.OperationHeader:
        self._operations += 1
        return common_pb2.OperationHeader(
            operation_id=f"op-{self._operations}",
            session_id=SESSION,
            run_id=self.run_id,
            seq_id=self._operations,
            previous_seq_id=self._operations - 1,
        )


@asynccontextmanager
async def worker(bench: Bench, spec: WorkerSpec) -> AsyncIterator[Caller]:
    """Run a worker, awake and with a lease, as an agent does."""
    launcher = ProcessLauncher(data_dir=bench.work)
    try:
        handle = await launcher.start(spec)
        if answer := await wait_until_serving(handle, timeout=spec.start_timeout):
            raise RuntimeError(answer)
        async with plain_channel(handle.address, options=GRPC_OPTIONS) as channel:
            yield Caller(channel, spec=spec, handle=handle)
    finally:
        await launcher.close()


def whole_training(size: str) -> TrainingSpec:
    """Return the training of all parameters. One device has room for those of a large model with
    states in bfloat16 only."""
    return TrainingSpec(states="bfloat16" if is_large(size) else "float32")


def trainer_spec(
    bench: Bench,
    size: str,
    model: Path,
    *,
    training: TrainingSpec | None = None,
    **settings: str | int,
) -> WorkerSpec:
    """`training` None: all parameters. `settings`: see `TrainerSettings`."""
    return spec_of(
        bench,
        model,
        worker_id=f"trainer-{size}",
        kind="trainer",
        run_id=RUN,
        trainer=TrainerSettings.model_validate(settings),
        training=training or whole_training(size),
    )


def spec_of(bench: Bench, model: Path, **more: object) -> WorkerSpec:
    return WorkerSpec(
        secret=_SECRET,
        model_name=MODEL,
        model_path=str(model),
        session_id=SESSION,
        devices=(bench.device,),
        lease=1,
        start_timeout=CALL_SECONDS,
        **more,
    )


async def forward_backward(
    trainer: Caller, sequences: Sequence[Int64Array], *, forward_only: bool = False
) -> list[Float32Array]:
    """Train all tokens but the first of each sequence by cross-entropy. Return their logprobs."""
    message = wire.ForwardBackwardRequest(
        model_id=RUN,
        data=[_datum(each) for each in sequences],
        loss_fn="cross_entropy",
        forward_only=forward_only,
    )
    reply = await trainer.call(
        "ForwardBackward",
        trainer_pb2.ForwardBackwardRequest(
            header=trainer.header(), payload=message.SerializeToString()
        ),
    )
    output = wire.ForwardBackwardOutput.FromString(reply.output)
    fields = [record.fields["logprobs"] for record in output.loss_fn_outputs]
    flat = np.concatenate([np.frombuffer(field.data, "<f4") for field in fields])
    return np.split(flat, np.cumsum([len(each) - 1 for each in sequences])[:-1])


def _datum(sequence: Int64Array) -> wire.Datum:
    datum = wire.Datum()
    datum.model_input.add().encoded_text.tokens = sequence[:-1].astype("<i4").tobytes()
    targets = sequence[1:].astype("<i8")
    datum.loss_fn_inputs["target_tokens"].CopyFrom(
        wire.Tensor(dense=targets.tobytes(), dtype=wire.DTYPE_INT64, shape=targets.shape)
    )
    return datum


async def optim_step(trainer: Caller) -> None:
    adamw = trainer_pb2.AdamWParams(learning_rate=LEARNING_RATE, beta1=0.9, beta2=0.95, eps=1e-8)
    await trainer.call(
        "OptimStep", trainer_pb2.OptimStepRequest(header=trainer.header(), adamw=adamw)
    )


async def train_step(trainer: Caller, sequences: Sequence[Int64Array]) -> None:
    """Train by a step of AdamW. Both operations are sent at once, as a gateway does."""
    await asyncio.gather(forward_backward(trainer, sequences), optim_step(trainer))


async def step(trainer: Caller, size: str) -> None:
    """Train by a step on one sequence."""
    await train_step(trainer, sequences_of(size, count=1, length=512))


async def publish(
    bench: Bench, trainer: Caller, number: int, *, handoff: bool = False, early: bool = False
) -> trainer_pb2.PublishReply:
    """Publish the weights, with `handoff` in memory, too. An `early` version is not durable until
    `until_durable`."""
    name = new_version_name(run_id=RUN, number=number)
    path = version_path(bench.work, name)
    version = common_pb2.WeightVersion(name=name, path=str(path), run_id=RUN, step=number)
    request = trainer_pb2.PublishRequest(
        header=trainer.header(), version=version, handoff=handoff, early=early
    )
    reply: trainer_pb2.PublishReply = await trainer.call("Publish", request)
    bench.say(f"published {reply.bytes / 1e9:.3f} GB in {reply.seconds:.2f} s")
    return reply


async def until_durable(trainer: Caller, reply: trainer_pb2.PublishReply) -> None:
    """Wait until a version's files are written and synced."""
    if not reply.durable:
        header = common_pb2.OperationHeader(run_id=RUN)
        request = trainer_pb2.PublishRequest(header=header, version=reply.version)
        ended: trainer_pb2.PublishReply = await trainer.call("AwaitPublished", request)
        assert ended.durable, ended.failure


def forget(*versions: common_pb2.WeightVersion) -> None:
    """Remove unused versions, because a disk holds few of a large model."""
    for version in versions:
        shutil.rmtree(version.path)


def torch_device(bench: Bench) -> str:
    return "cuda" if bench.gpu is not None else "cpu"


def rate(size: int, seconds: float) -> float:
    return round(size / seconds / 1e9, 2) if seconds else 0.0
