"""A gateway with workers that do arithmetic instead of learning, for the tests of the gateway.

The workers are real gRPC servers of the real services' protos, in this process; the launcher
that "starts" them is a fake. The gateway is the real one, on a real port, in a thread.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future as ThreadFuture
from contextlib import contextmanager
from pathlib import Path

import grpc
import grpc.aio
import httpx
import numpy as np
import tinker
from tinker import types

from gateway.app import create_app
from gateway.launchers.base import WorkerExit, WorkerHandle
from gateway.limits import Counts, Limits
from gateway.metrics import Metrics
from gateway.server import GatewayServer, make_server
from tandem.errors import TandemError, WorkerCrashed, WorkerStartFailed
from tandem.settings import GatewaySettings, LimitSettings
from tandem.v1 import sampler_pb2, sampler_pb2_grpc, trainer_pb2, trainer_pb2_grpc
from tandem.weights import Manifest, PartialVersion, checksum_file, version_path
from tandem.wire.v1 import tinker_pb2
from tandem.worker import SECRET_METADATA_KEY, WorkerSpec

KEY = "tml-test-key"


class FakeTrainer(trainer_pb2_grpc.TrainerServicer):
    """Applies operations in log order. `gate` holds them back while it is not set."""

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        self.applied: list[tuple[str, int]] = []
        self.requests: list[object] = []
        self.step = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.fail_with: dict[int, TandemError] = {}
        self._turn = asyncio.Condition()
        self._done = 0

    async def _admit(self, context, header) -> TandemError | None:
        metadata = dict(context.invocation_metadata())
        assert metadata[SECRET_METADATA_KEY] == self.spec.secret
        assert context.time_remaining() is not None, "a call without a deadline"
        async with self._turn:
            await self._turn.wait_for(lambda: self._done >= header.previous_seq_id)
        await self.gate.wait()
        return self.fail_with.get(header.seq_id - 1)

    async def _apply(self, kind: str, request) -> None:
        self.applied.append((kind, request.header.seq_id - 1))
        self.requests.append(request)
        async with self._turn:
            self._done = request.header.seq_id
            self._turn.notify_all()

    async def Describe(self, request, context):
        return trainer_pb2.DescribeTrainerReply(architecture="Fake", parameters=7, ranks=1)

    async def ForwardBackward(self, request, context):
        error = await self._admit(context, request.header)
        await self._apply("forward_backward", request)
        if error is not None:
            return trainer_pb2.ForwardBackwardReply(failure=error.to_failure())
        message = tinker_pb2.ForwardBackwardRequest.FromString(request.payload)
        lengths = [len(d.model_input[0].encoded_text.tokens) for d in message.data]
        output = tinker_pb2.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
        record = output.loss_fn_outputs.add(num_datums=len(lengths))
        field = record.fields["logprobs"]
        field.data = np.full(sum(lengths) // 4, -1.0, np.float32).tobytes()
        field.offsets = np.cumsum([0, *lengths]).astype(np.int64).tobytes()
        field.dtype = tinker_pb2.DTYPE_FLOAT32
        output.metrics["loss:sum"] = float(len(lengths))
        return trainer_pb2.ForwardBackwardReply(
            output=output.SerializeToString(), tokens=sum(lengths) // 4, seconds=0.5
        )

    async def OptimStep(self, request, context):
        error = await self._admit(context, request.header)
        await self._apply("optim_step", request)
        if error is not None:
            return trainer_pb2.OptimStepReply(failure=error.to_failure())
        self.step += 1
        return trainer_pb2.OptimStepReply(seconds=0.25, step=self.step, metrics={"grad_norm": 1.5})

    async def Publish(self, request, context):
        error = await self._admit(context, request.header)
        await self._apply("publish", request)
        if error is not None:
            return trainer_pb2.PublishReply(failure=error.to_failure())
        version = request.version
        version.step = self.step
        version.adapter = self.is_lora and not request.merged
        manifest = self._write_version(version)
        return trainer_pb2.PublishReply(version=version, bytes=manifest.bytes)

    @property
    def is_lora(self) -> bool:
        return self.spec.training is not None and self.spec.training.lora is not None

    def _write_version(self, version) -> Manifest:
        """As a trainer does: weights that say how often they were stepped, and their manifest."""
        partial = PartialVersion(version_path(Path(self.spec.data_dir), version.name))
        partial.create()
        names = (
            ("adapter_model.safetensors", "adapter_config.json")
            if version.adapter
            else ("model.safetensors", "config.json")
        )
        (partial.path / names[0]).write_bytes(b"weights of step %d" % self.step)
        (partial.path / names[1]).write_text('{"fake": true}')
        manifest = Manifest(
            version=version.name,
            run_id=version.run_id,
            step=self.step,
            adapter=version.adapter,
            dtype="float32",
            tensors=1,
            created="2026-01-01T00:00:00+00:00",
            files=[checksum_file(partial.path / name) for name in names],
        )
        partial.commit(manifest)
        return manifest

    async def SaveCheckpoint(self, request, context):
        await self._admit(context, request.header)
        await self._apply("save", request)
        folder = Path(request.path)
        folder.mkdir(parents=True)  # noqa: ASYNC240
        (folder / "__0_0.distcp").write_bytes(b"state of step %d" % self.step)
        (folder / ".metadata").write_bytes(b"layout")
        entries = [checksum_file(folder / name) for name in (".metadata", "__0_0.distcp")]
        record = {"step": self.step, "files": [entry.model_dump() for entry in entries]}
        (folder / "checkpoint.json").write_text(json.dumps(record))
        return trainer_pb2.SaveCheckpointReply(step=self.step, bytes=21)

    async def LoadCheckpoint(self, request, context):
        await self._admit(context, request.header)
        await self._apply("load", request)
        record = json.loads((Path(request.path) / "checkpoint.json").read_text())
        for entry in record["files"]:
            assert checksum_file(Path(request.path) / entry["name"]).model_dump() == entry
        self.step = record["step"]
        return trainer_pb2.LoadCheckpointReply(step=self.step)


class FakeSampler(sampler_pb2_grpc.SamplerServicer):
    """Answers every prompt with its tokens, reversed, or what `speak` makes of them. `gate` holds
    samples back (streams after their first token), and `slow_loads` the loads that have a number
    in it, each until its event is set. Token i of an answer has the logprob -i, and alternatives
    are the tokens 0, 1, … with 0, -1, …."""

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        self.requests: list[sampler_pb2.SampleRequest] = []
        self.cancelled: list[int] = []
        self.loaded: list[str] = []
        self.slow_loads: dict[int, asyncio.Event] = {}
        self.gate = asyncio.Event()
        self.gate.set()
        self.load_error: TandemError | None = None
        self.sample_error: TandemError | None = None
        self.speak = lambda tokens: tokens[::-1]

    async def Load(self, request, context):
        if self.load_error is not None:
            return sampler_pb2.LoadReply(failure=self.load_error.to_failure())
        self.loaded.append(request.version.name)
        if (slow := self.slow_loads.get(len(self.loaded))) is not None:
            await slow.wait()
        return sampler_pb2.LoadReply(version=request.version, bytes=7)

    async def Sample(self, request, context):
        assert dict(context.invocation_metadata())[SECRET_METADATA_KEY] == self.spec.secret
        self.requests.append(request)
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled.append(request.seq_id)
            raise
        if self.sample_error is not None:
            return sampler_pb2.SampleReply(failure=self.sample_error.to_failure())
        prompt = np.frombuffer(request.prompt_tokens, np.int32)
        tokens = np.array(self.speak(prompt.tolist()), np.int32)
        response = tinker_pb2.SampleResponse(
            prompt_cache_hit_tokens=1, tandem_weight_version=request.version.name
        )
        if k := request.topk_prompt_logprobs:
            response.topk_prompt_logprobs.CopyFrom(_topk(len(prompt), k))
        if request.prompt_logprobs:
            logprobs = np.full(len(prompt), -1, np.float32)
            logprobs[: -request.prompt_logprobs_last_n or 1] = np.nan
            response.prompt_logprobs = logprobs.tobytes()
        if k := request.prompt_alt_tokens_k:
            for field, dtype in (("tokens", np.int64), ("logprobs", np.float32)):
                tensor = getattr(response.prompt_alt_tokens, field)
                tensor.dense = np.zeros((len(tokens) - 1, k), dtype).tobytes()
                tensor.dtype = (
                    tinker_pb2.DTYPE_INT64 if dtype is np.int64 else tinker_pb2.DTYPE_FLOAT32
                )
                tensor.shape.extend([len(tokens) - 1, k])
        for _ in range(request.num_samples):
            sequence = response.sequences.add(
                tokens=tokens.tobytes(),
                logprobs=(-np.arange(len(tokens), dtype=np.float32)).tobytes(),
            )
            if k := request.topk_sample_logprobs:
                sequence.topk_sampled_logprobs.CopyFrom(_topk(len(tokens), k))
        return sampler_pb2.SampleReply(
            response=response.SerializeToString(),
            version=request.version,
            prompt_tokens=len(prompt),
            cached_tokens=1,
            sampled_tokens=len(tokens) * request.num_samples,
        )

    async def SampleStream(self, request, context):
        """Token by token, the samples of a request in turn."""
        gate, self.gate = self.gate, asyncio.Event()
        self.gate.set()
        try:
            reply = await self.Sample(request, context)
        finally:
            self.gate = gate
        response = tinker_pb2.SampleResponse.FromString(reply.response)
        longest = max((len(s.tokens) // 4 for s in response.sequences), default=0)
        for at in range(longest):
            for index, sequence in enumerate(response.sequences):
                delta = _delta(index, sequence, at, k=request.topk_sample_logprobs)
                yield sampler_pb2.SampleEvent(delta=delta)
            try:
                await self.gate.wait()
            except asyncio.CancelledError:
                self.cancelled.append(request.seq_id)
                raise
        yield sampler_pb2.SampleEvent(reply=reply)


def _topk(length: int, k: int) -> tinker_pb2.TopkLogprobs:
    ids = np.tile(np.arange(k, dtype=np.int32), (length, 1))
    return tinker_pb2.TopkLogprobs(
        token_ids=ids.tobytes(), logprobs=(-ids).astype(np.float32).tobytes(), k=k, length=length
    )


def _delta(index: int, sequence, at: int, *, k: int) -> sampler_pb2.SampleDelta:
    here = slice(4 * at, 4 * at + 4)
    delta = sampler_pb2.SampleDelta(
        index=index,
        tokens=sequence.tokens[here],
        logprobs=sequence.logprobs[here],
        finished=4 * at + 4 == len(sequence.tokens),
        stop_reason=sequence.stop_reason,
    )
    if k:
        delta.topk.CopyFrom(_topk(1, k))
    return delta


class FakeLauncher:
    """Implements `Launcher` with gRPC servers in this process; `trainer` is made for each run."""

    def __init__(self, trainer: Callable[[WorkerSpec], FakeTrainer] = FakeTrainer) -> None:
        self._trainer = trainer
        self.specs: list[WorkerSpec] = []
        self.stopped: list[str] = []
        self.servicers: dict[str, FakeTrainer | FakeSampler] = {}
        self.start_error: dict[str, str] = {}
        self.crashes = 0  # starts that crash from now on
        self.start_gate = asyncio.Event()
        self.start_gate.set()
        self._servers: dict[str, grpc.aio.Server] = {}
        self._exits: asyncio.Queue[WorkerExit] = asyncio.Queue()

    async def start(self, spec: WorkerSpec) -> WorkerHandle:
        self.specs.append(spec)
        await self.start_gate.wait()
        if self.crashes > 0:
            self.crashes -= 1
            raise WorkerCrashed(f"the {spec.kind} was killed by SIGSEGV")
        if reason := self.start_error.get(spec.kind):
            raise WorkerStartFailed(reason)
        server = grpc.aio.server()
        if spec.kind == "trainer":
            trainer = self.servicers[spec.worker_id] = self._trainer(spec)
            trainer_pb2_grpc.add_TrainerServicer_to_server(trainer, server)
        else:
            sampler = self.servicers[spec.worker_id] = FakeSampler(spec)
            sampler_pb2_grpc.add_SamplerServicer_to_server(sampler, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        self._servers[spec.worker_id] = server
        return WorkerHandle(
            worker_id=spec.worker_id,
            kind=spec.kind,
            address=f"127.0.0.1:{port}",
            metrics_port=0,
            pid=1,
            log_path=Path("log"),
            secret=spec.secret,
        )

    async def wait_ready(self, worker_id: str) -> None:
        return None

    async def stop(self, worker_id: str) -> None:
        self.stopped.append(worker_id)
        await self._end(worker_id)

    async def kill(self, worker_id: str, reason: str) -> None:
        """The worker ends without having been asked to."""
        await self._end(worker_id)
        self._exits.put_nowait(WorkerExit(worker_id=worker_id, reason=reason))

    async def _end(self, worker_id: str) -> None:
        server = self._servers.pop(worker_id, None)
        if server is not None:
            await server.stop(grace=None)

    def list(self) -> list[WorkerHandle]:
        return []

    async def watch(self) -> AsyncIterator[WorkerExit]:
        while True:
            yield await self._exits.get()

    async def close(self) -> None:
        for worker_id in tuple(self._servers):
            await self._end(worker_id)


class Gate:
    """A running gateway, seen from a test's thread."""

    def __init__(self, *, server: GatewayServer, launcher: FakeLauncher, loop, settings) -> None:
        self.server = server
        self.launcher = launcher
        self.settings = settings
        self.gateway = server._gateway
        self._loop = loop

    @property
    def url(self) -> str:
        return self.server.url

    def run(self, coroutine):
        """Runs a coroutine, or a plain function, in the gateway's loop."""
        if callable(coroutine):

            async def call(function=coroutine):
                return function()

            coroutine = call()
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(20)

    def http(self, key: str = KEY) -> httpx.Client:
        # Reading the system's certificates takes longer than a request.
        return httpx.Client(base_url=self.url, headers={"X-API-Key": key}, timeout=30, verify=False)

    def service(self) -> tinker.ServiceClient:
        return tinker.ServiceClient(base_url=self.url, api_key=KEY)

    def worker(self, kind: str, index: int = -1):
        wait_for(lambda: [w for w in self.launcher.servicers if w.startswith(kind)])
        ids = [w for w in self.launcher.servicers if w.startswith(kind)]
        return ids[index], self.launcher.servicers[ids[index]]

    def session_id(self) -> str:
        with self.http() as client:
            answer = client.post("/api/v1/create_session", json={"tags": [], "sdk_version": "test"})
            return answer.json()["session_id"]

    def run_id(self, session_id: str, number: int = 0) -> str:
        with self.http() as client:
            answer = client.post(
                "/api/v1/create_model",
                json={
                    "session_id": session_id,
                    "model_seq_id": number,
                    "base_model": "tiny:full",
                },
            )
            assert answer.status_code == 200, answer.text
            self.retrieve(answer.json()["request_id"])
            return answer.json()["model_id"]

    def retrieve(self, request_id: str) -> httpx.Response:
        with self.http() as client:
            deadline = time.monotonic() + 20
            while time.monotonic() < deadline:
                answer = client.post("/api/v1/retrieve_future", json={"request_id": request_id})
                if answer.status_code != 408:
                    return answer
        raise AssertionError(f"{request_id} did not end")


def settings_for(tmp_path: Path, **changes) -> GatewaySettings:
    values = {
        "data_dir": tmp_path / "data",
        "port": 0,
        "api_key": KEY,
        "long_poll": 0.3,
        "reaper_interval": 0.05,
        "min_free_bytes": 0,
        "trainer": {"operation_timeout": 20},
        "sampler": {"operation_timeout": 20},
    }
    return GatewaySettings(**(values | changes))


def no_counts() -> Limits:
    """The limits of a gateway in which nobody has anything yet."""

    async def nothing(_owner: str) -> int:
        return 0

    return Limits(
        settings=LimitSettings(),
        metrics=Metrics(),
        counts=Counts(
            owner_of=lambda _session_id: "local",
            active={
                what: lambda _owner: 0
                for what in ("sessions", "runs", "samplers", "sampling_sessions")
            },
            custom_losses=nothing,
            checkpoint_bytes=nothing,
        ),
    )


def make_model(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(
        '{"architectures": ["Qwen3ForCausalLM"], "max_position_embeddings": 64}'
    )
    return folder


@contextmanager
def running_gateway(
    tmp_path: Path, *, launcher: FakeLauncher | None = None, **changes
) -> Iterator[Gate]:
    """A gateway on a free port that knows the model `tiny`."""
    launcher = launcher or FakeLauncher()
    settings = settings_for(tmp_path, **changes)
    ready: ThreadFuture[Gate] = ThreadFuture()

    async def serve() -> None:
        server = make_server(create_app(settings, launcher=launcher), settings)
        server.config.load()
        server.capture_signals = _no_signals  # we are not in the main thread
        task = asyncio.create_task(server.serve())
        while not server.started and not task.done():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        if task.done():
            ready.set_exception(AssertionError("the gateway did not start"))
            return
        ready.set_result(
            Gate(
                server=server,
                launcher=launcher,
                loop=asyncio.get_running_loop(),
                settings=settings,
            )
        )
        await task

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    gate = ready.result(30)
    try:
        gate.run(gate.gateway.models.add(name="tiny", path=str(make_model(tmp_path / "tiny"))))
        yield gate
    finally:
        gate.server.should_exit = True
        thread.join(30)
        assert not thread.is_alive(), "the gateway did not stop"


@contextmanager
def _no_signals() -> Iterator[None]:
    yield


def wait_for(condition, timeout: float = 20.0) -> None:
    """Returns when the condition holds; fails after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.01)


def datum(tokens: list[int]) -> types.Datum:
    size = len(tokens)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens),
        loss_fn_inputs={
            "target_tokens": types.TensorData(data=tokens, dtype="int64", shape=[size]),
            "weights": types.TensorData(data=[1.0] * size, dtype="float32", shape=[size]),
        },
    )


def forward_backward_bytes(run_id: str, seq_id: int, *, forward_only: bool = False) -> bytes:
    message = tinker_pb2.ForwardBackwardRequest(
        model_id=run_id, seq_id=seq_id, loss_fn="cross_entropy", forward_only=forward_only
    )
    message.data.add().model_input.add().encoded_text.tokens = np.arange(
        3, dtype=np.int32
    ).tobytes()
    return message.SerializeToString()
