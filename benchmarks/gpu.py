"""`make bench-gpu`: how fast workers leave a GPU and come back, beside what copies can do there.

For each size, a real trainer of random weights does a step with all parameters, so that it has
its optimizer's state, and then sleeps and wakes a few times; beside it stand plain copies between
the GPU and pinned host memory in the same minutes. Its weights, published before and after another
step, are then loaded in turn by a real engine, which sleeps and wakes as well. Last, two
experiments share the one device through a whole stack, beside the same two in a row.

A size takes minutes: `--sizes 0.5B` and `--only trainers` measure parts. `--device cpu` with
`--sizes tiny` runs the same code on cores, where host and device are the same memory: what that
cannot measure is named in the results.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import shutil
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import ParamSpec, TypeVar

import grpc.aio
import numpy as np
import psutil
from rich.console import Console

from benchmarks import record
from tandem.agent.launcher import ProcessLauncher
from tandem.agent.suspender import CudaCheckpoint, uses_gpu
from tandem.agent.worker_process import group_members
from tandem.demo.tiny_model import TinyShape, tensor_shapes, write_layout
from tandem.devices import Device, confine, parse_device
from tandem.errors import SuspendFailed
from tandem.fencing import LEASE_METADATA_KEY
from tandem.host import Accelerator, accelerators, driver_version, this_host
from tandem.settings import SamplerSettings, TrainerSettings
from tandem.v1 import common_pb2, sampler_pb2, sampler_pb2_grpc, trainer_pb2, trainer_pb2_grpc
from tandem.weights import new_version_name, version_path
from tandem.wire.v1 import tinker_pb2 as wire
from tandem.worker import GRPC_OPTIONS, SECRET_METADATA_KEY, WorkerSpec

SIZES = {
    "0.5B": TinyShape(
        hidden=896, layers=24, ffn=4864, heads=14, head_dim=64, vocabulary=151_936, max_length=4096
    ),
    "1.5B": TinyShape(
        hidden=1536,
        layers=28,
        ffn=8960,
        heads=12,
        head_dim=128,
        vocabulary=151_936,
        max_length=4096,
    ),
    "4B": TinyShape(
        hidden=2560, layers=36, ffn=9728, heads=40, head_dim=64, vocabulary=151_936, max_length=4096
    ),
    "tiny": TinyShape(),
}
"""Shapes with about the parameters of the models of these names."""
PARTS = ("trainers", "engines", "together")
MODEL = "bench/gpu"
_SECRET, _SESSION = "of the benchmark", "s-benchmark"
_RUN = f"{_SESSION}:train:0"
_CALL_SECONDS = 600.0
_KV_CACHE_BYTES = 4 * 2**30
_NEEDED_TOGETHER = ("vllm", "tinker", "fastapi")
_TOKENS = 512
"""Of the one sequence of a step."""

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Bench:
    """Where and how often to measure. `gpu` None: on the cores. `say` prints what is done."""

    work: Path
    device: str
    gpu: Accelerator | None
    rounds: int
    say: Callable[[str], None]

    def used_bytes(self, pid: int) -> int:
        """Return what is in use of the whole GPU; on a CPU, the resident memory of a worker."""
        if self.gpu is None:
            own = psutil.Process(pid)
            return sum(each.memory_info().rss for each in [own, *own.children(recursive=True)])
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(self.gpu.index)
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)


def elsewhere(bench: Bench, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Return what a function returns in a process of its own on the device, of which that holds
    nothing afterwards."""
    context, device = get_context("spawn"), parse_device(bench.device)
    with ProcessPoolExecutor(1, context, initializer=confine, initargs=(device,)) as pool:
        return pool.submit(work, *args, **kwargs).result()


def write_model(path: Path, size: str, device: str) -> None:
    """Write a model of random weights in bfloat16, drawn on the device."""
    import torch
    from safetensors.torch import save_file

    shape = SIZES[size]
    write_layout(path, shape)
    weights = {
        name: torch.ones(sizes, dtype=torch.bfloat16)
        if len(sizes) == 1
        else torch.empty(sizes, device=device).normal_(std=0.02).bfloat16().cpu()
        for name, sizes in tensor_shapes(shape).items()
    }
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})


def copies(device: str, *, size: int, rounds: int) -> dict[str, float]:
    """Return the median GB/s of copies from the device to host memory ("out"), and back ("in"):
    pinned memory, on a GPU."""
    import torch

    gpu = device == "cuda"
    there = torch.ones(size, dtype=torch.uint8, device=device)
    host = torch.ones(size, dtype=torch.uint8, pin_memory=gpu)
    found = {}
    for name, (target, source) in {"out": (host, there), "in": (there, host)}.items():
        seconds = []
        for _ in range(rounds):
            began = time.perf_counter()
            target.copy_(source, non_blocking=True)
            if gpu:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
        found[name] = _rate(size, statistics.median(seconds))
    return found


class Caller:
    """Calls one worker. Each Sleep and each Wake has a newer fencing token, as every call after."""

    def __init__(self, channel: grpc.aio.Channel, *, kind: str, pid: int) -> None:
        trainer = kind == "trainer"
        stub = trainer_pb2_grpc.TrainerStub if trainer else sampler_pb2_grpc.SamplerStub
        self._stub = stub(channel)
        self._token, self._operations = 1, 0
        self.pid = pid

    async def call(self, method: str, request: object) -> object:
        """Return the reply. Raises `RuntimeError` where that is a failure."""
        metadata = ((SECRET_METADATA_KEY, _SECRET), (LEASE_METADATA_KEY, str(self._token)))
        reply = await getattr(self._stub, method)(request, metadata=metadata, timeout=_CALL_SECONDS)
        if reply.HasField("failure"):
            raise RuntimeError(f"{method}: {reply.failure.message}")
        return reply

    async def switch(
        self, request: common_pb2.SleepRequest | common_pb2.WakeRequest
    ) -> common_pb2.SwitchReply:
        self._token += 1
        method = "Sleep" if isinstance(request, common_pb2.SleepRequest) else "Wake"
        return await self.call(method, request)

    async def parameters(self) -> int:
        """Return how many a trainer's model has."""
        request = trainer_pb2.DescribeTrainerRequest(run_id=_RUN)
        metadata = ((SECRET_METADATA_KEY, _SECRET),)
        about = await self._stub.Describe(request, metadata=metadata, timeout=_CALL_SECONDS)
        return about.parameters

    def header(self) -> common_pb2.OperationHeader:
        """Return that of the next operation of the run."""
        self._operations += 1
        return common_pb2.OperationHeader(
            operation_id=f"op-{self._operations}",
            session_id=_SESSION,
            run_id=_RUN,
            seq_id=self._operations,
            previous_seq_id=self._operations - 1,
        )


@asynccontextmanager
async def worker(bench: Bench, spec: WorkerSpec) -> AsyncIterator[Caller]:
    """Run a worker, awake and with a lease, as an agent does."""
    launcher = ProcessLauncher(data_dir=bench.work)
    try:
        handle = await launcher.start(spec)
        await launcher.wait_ready(spec.worker_id)
        pid = launcher.describe(spec.worker_id).pid
        async with grpc.aio.insecure_channel(handle.address, options=GRPC_OPTIONS) as channel:
            yield Caller(channel, kind=spec.kind, pid=pid)
    finally:
        await launcher.close()


def _spec(bench: Bench, model: Path, **more: object) -> WorkerSpec:
    return WorkerSpec(
        secret=_SECRET,
        model_name=MODEL,
        model_path=str(model),
        session_id=_SESSION,
        devices=(bench.device,),
        lease=1,
        start_timeout=_CALL_SECONDS,
        **more,
    )


async def step(trainer: Caller, size: str) -> None:
    """Train all parameters by a step of AdamW."""
    shape = SIZES[size]
    count = min(_TOKENS, shape.max_length)
    tokens = np.random.default_rng(0).integers(3, shape.vocabulary, count + 1)
    datum = wire.Datum()
    datum.model_input.add().encoded_text.tokens = tokens[:-1].astype("<i4").tobytes()
    datum.loss_fn_inputs["target_tokens"].CopyFrom(
        wire.Tensor(dense=tokens[1:].astype("<i8").tobytes(), dtype=wire.DTYPE_INT64, shape=[count])
    )
    message = wire.ForwardBackwardRequest(model_id=_RUN, data=[datum], loss_fn="cross_entropy")
    await trainer.call(
        "ForwardBackward",
        trainer_pb2.ForwardBackwardRequest(
            header=trainer.header(), payload=message.SerializeToString()
        ),
    )
    adamw = trainer_pb2.AdamWParams(learning_rate=1e-5, beta1=0.9, beta2=0.95, eps=1e-8)
    await trainer.call(
        "OptimStep", trainer_pb2.OptimStepRequest(header=trainer.header(), adamw=adamw)
    )


async def publish(bench: Bench, trainer: Caller, number: int) -> common_pb2.WeightVersion:
    name = new_version_name(run_id=_RUN, number=number)
    path = version_path(bench.work, name)
    version = common_pb2.WeightVersion(name=name, path=str(path), run_id=_RUN, step=number)
    request = trainer_pb2.PublishRequest(header=trainer.header(), version=version)
    reply = await trainer.call("Publish", request)
    bench.say(f"published {reply.bytes / 1e9:.1f} GB in {reply.seconds:.1f} s")
    return version


async def sleeps(
    bench: Bench, worker: Caller, *, before: int, level: int = 0
) -> dict[str, float | int]:
    """Let a worker sleep and wake. The first time makes the buffers and is told apart; `before`
    was in use of the device before it came."""
    awake, left, moved, host = bench.used_bytes(worker.pid) - before, [], 0, 0
    slept, woken = [], []
    for _ in range(bench.rounds + 1):
        asleep = await worker.switch(common_pb2.SleepRequest(level=level))
        left.append(bench.used_bytes(worker.pid) - before)
        moved, host = asleep.bytes_moved, asleep.host_bytes
        slept.append(asleep.seconds)
        woken.append((await worker.switch(common_pb2.WakeRequest())).seconds)
    out, back = statistics.median(slept[1:]), statistics.median(woken[1:])
    return {
        "bytes_moved": moved,
        "host_bytes": host,
        "device_bytes_awake": awake,
        "device_bytes_left": max(left),
        "first_sleep_seconds": round(slept[0], 3),
        "sleep_seconds": round(out, 3),
        "wake_seconds": round(back, 3),
        "sleep_gb_per_second": _rate(moved, out),
        "wake_gb_per_second": _rate(moved, back),
    }


async def suspended(bench: Bench, worker: Caller, *, before: int) -> dict[str, float | int | str]:
    """Let the host suspend and resume a worker that is awake, from outside; or say why it cannot.
    If that fails, the worker may be of no use any more."""
    suspender = CudaCheckpoint()
    if reason := suspender.why_not() if bench.gpu is not None else "there is no NVIDIA device":
        return {"not measured": reason}
    try:
        return await _suspended(bench, worker, suspender, before=before)
    except SuspendFailed as error:
        return {"failed": error.message}


async def _suspended(
    bench: Bench, worker: Caller, suspender: CudaCheckpoint, *, before: int
) -> dict[str, float | int | str]:
    pids = [pid for pid in group_members(worker.pid) if uses_gpu(pid)]
    out, back, left = [], [], []
    for _ in range(bench.rounds):
        began = time.perf_counter()
        await suspender.suspend(pids, timeout=_CALL_SECONDS)
        out.append(time.perf_counter() - began)
        left.append(bench.used_bytes(worker.pid) - before)
        began = time.perf_counter()
        await suspender.resume(pids, timeout=_CALL_SECONDS)
        back.append(time.perf_counter() - began)
    return {
        "suspend_seconds": round(statistics.median(out), 3),
        "resume_seconds": round(statistics.median(back), 3),
        "device_bytes_left": max(left),
    }


async def trainer_of(
    bench: Bench, size: str, model: Path, *, measured: bool, versions: int
) -> tuple[dict[str, object], list[common_pb2.WeightVersion]]:
    """Measure a trainer that sleeps, if that is wanted; return it, and versions of its weights."""
    bench.say(f"{size}: a trainer of all parameters starts")
    size_of_copies = 4 * 2**30 if bench.gpu is not None else 64 * 2**20
    plain = elsewhere(bench, copies, _torch_device(bench), size=size_of_copies, rounds=bench.rounds)
    before = bench.used_bytes(0) if bench.gpu is not None else 0
    spec = _spec(
        bench, model, worker_id=f"trainer-{size}", kind="trainer", run_id=_RUN,
        trainer=TrainerSettings(),
    )  # fmt: skip
    found: dict[str, object] = {}
    async with worker(bench, spec) as trainer:
        await step(trainer, size)
        if measured:
            found = {"parameters": await trainer.parameters(), "copies_gb_per_second": plain}
            found |= await sleeps(bench, trainer, before=before)
            found["sleep_of_copies"] = round(found["sleep_gb_per_second"] / plain["out"], 2)
            found["wake_of_copies"] = round(found["wake_gb_per_second"] / plain["in"], 2)
            bench.say(json.dumps(found))
        published = []
        for number in range(1, versions + 1):
            published.append(await publish(bench, trainer, number))
            await step(trainer, size)
        if measured:
            found["suspended"] = await suspended(bench, trainer, before=before)
            bench.say(json.dumps(found["suspended"]))
    return found, published


async def engine_of(
    bench: Bench, size: str, model: Path, versions: Sequence[common_pb2.WeightVersion]
) -> dict[str, object]:
    """Measure an engine that loads versions in turn, and sleeps at each level."""
    bench.say(f"{size}: an engine starts")
    before = bench.used_bytes(0) if bench.gpu is not None else 0
    weights = 2 * sum(math.prod(sizes) for sizes in tensor_shapes(SIZES[size]).values())
    settings = SamplerSettings(
        max_model_len=min(2048, SIZES[size].max_length),
        max_num_seqs=64,
        kv_cache_bytes=64 * 2**20,
        gpu_memory_bytes=weights + 2 * _KV_CACHE_BYTES if bench.gpu is not None else 0,
    )
    spec = _spec(bench, model, worker_id=f"sampler-{size}", kind="sampler", sampler=settings)
    began = time.perf_counter()
    async with worker(bench, spec) as engine:
        found: dict[str, object] = {"start_seconds": round(time.perf_counter() - began, 1)}
        replies = []
        for number in range(2 * bench.rounds):
            version = versions[number % len(versions)]
            replies.append(await engine.call("Load", sampler_pb2.LoadRequest(version=version)))
        seconds = statistics.median(reply.seconds for reply in replies)
        found |= {
            "weights_bytes": replies[-1].bytes,
            "reload_seconds": round(seconds, 3),
            "reload_gb_per_second": _rate(replies[-1].bytes, seconds),
            "first_reload_seconds": round(replies[0].seconds, 3),
            "canary_difference": round(max(reply.canary_difference for reply in replies), 5),
        }
        for level in (1, 2):
            found[f"sleep level {level}"] = await sleeps(bench, engine, before=before, level=level)
        bench.say(json.dumps(found))
    return found


def together(bench: Bench, size: str, model: Path, *, steps: int) -> dict[str, object]:
    """Measure two experiments that share the device, trainers and engines in turns, beside the same
    two in a row; all of them come to their end."""
    import tinker

    from benchmarks.timeslice import Experiment, at_once, in_a_row, switches
    from tandem.stack import Stack

    bench.say(f"{size}: two experiments share the device")
    group = {"name": "cores", "devices": [bench.device], "roles": ["trainer", "sampler"]}
    settings = {
        "port": "0",
        # A machine of one GPU has such a group without being told.
        "groups": json.dumps([] if bench.gpu is not None else [group]),
        "sampler_max_num_seqs": "64",
        "sampler_kv_cache_bytes": str(64 * 2**20),
        "pool_trainers": "0",
        "pool_samplers": "0",
    }
    with ExitStack() as until_the_end:
        stack = until_the_end.enter_context(Stack(data_dir=bench.work / "data", settings=settings))
        stack.add_model(name=MODEL, path=model)
        experiments = []
        for owner in ("one", "two"):  # who therefore share no trainer
            with stack.client() as client:
                body = {"owner": owner, "role": "member", "name": "bench"}
                key = client.post("keys", json=body).raise_for_status().json()["key"]
            service = until_the_end.enter_context(
                tinker.ServiceClient(base_url=stack.endpoint.url, api_key=key)
            )
            experiments.append(Experiment(service, model=MODEL, tokens=48, repeats=4))
            experiments[-1].step()
        began = time.perf_counter()
        in_a_row(experiments, steps)
        serial, since = time.perf_counter() - began, time.time()
        began = time.perf_counter()
        at_once(experiments, steps)
        both = time.perf_counter() - began
        found = {
            "steps": steps,
            "serial_seconds": round(serial, 2),
            "together_seconds": round(both, 2),
            "makespan_over_serial": round(both / serial, 3),
            "leases": switches(stack.data_dir / "tandem.db", since=since),
        }
    bench.say(json.dumps(found))
    return found


def measure(
    bench: Bench, sizes: Sequence[str], parts: Sequence[str], *, steps: int
) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield what was found of each size. What fails is told in its place, and the rest goes on."""
    for size in sizes:
        model = bench.work / size
        bench.say(f"{size}: random weights are written")
        found: dict[str, object] = {}
        try:
            elsewhere(bench, write_model, model, size, _torch_device(bench))
            if "trainers" in parts or "engines" in parts:
                measured, count = "trainers" in parts, 2 if "engines" in parts else 0
                row, versions = asyncio.run(
                    trainer_of(bench, size, model, measured=measured, versions=count)
                )
                found |= {"trainer": row} if measured else {}
            if "engines" in parts:
                found["engine"] = asyncio.run(engine_of(bench, size, model, versions))
            if "together" in parts and size == sizes[0]:
                found["together"] = together(bench, size, model, steps=steps)
        except Exception as error:  # noqa: BLE001 - minutes of a lent machine are not thrown away
            found["failed"] = f"{type(error).__name__}: {error}"
            bench.say(found["failed"])
        shutil.rmtree(model, ignore_errors=True)
        shutil.rmtree(bench.work / "weights", ignore_errors=True)
        yield size, found


def not_measured(gpu: Accelerator | None, *, missing: Sequence[str]) -> dict[str, str]:
    """Return what a machine without a GPU, or without these packages, cannot show, and why."""
    reasons = {}
    if gpu is None:
        reasons["GB/s, bytes left"] = (
            "there is no NVIDIA device: host and device are the same memory, and nothing moves. "
            "Device bytes are the resident memory of the worker"
        )
    if "vllm" in missing:
        reasons["engines"] = "vLLM is not installed"
    if missing:
        reasons["together"] = f"not installed: {', '.join(missing)}"
    return reasons


def _torch_device(bench: Bench) -> str:
    return "cuda" if bench.gpu is not None else "cpu"


def _rate(size: int, seconds: float) -> float:
    """Return GB/s."""
    return round(size / seconds / 1e9, 2) if seconds else 0.0


def main(arguments: Sequence[str] | None = None) -> dict[str, object]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["0.5B", "1.5B", "4B"])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu: all cores")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8, help="of each experiment")
    parser.add_argument("--no-save", action="store_true", help="only print")
    chosen = parser.parse_args(arguments)
    console = Console(width=160)
    gpu = None
    if chosen.device == "cuda":
        found = accelerators()
        if not found:
            raise SystemExit(
                "bench-gpu: there is no NVIDIA device here, and nothing was measured. "
                'ARGS="--device cpu --sizes tiny" runs the same code on the cores.'
            )
        gpu = found[0]
        device = f"cuda:{gpu.uuid}"
    else:
        device = str(Device("cpu", cores=frozenset(this_host().cores)))
    missing = [name for name in _NEEDED_TOGETHER if find_spec(name) is None]
    absent = not_measured(gpu, missing=missing)
    parts = [part for part in chosen.only if part not in absent]
    results: dict[str, object] = {
        "machine": record.machine()
        | {"gpu": gpu.name if gpu is not None else "none", "driver": driver_version()},
        "benchmark": "gpu",
        "rounds": chosen.rounds,
        "not_measured": absent,
    }
    for what, why in absent.items():
        console.print(f"not measured: {what}: {why}", highlight=False)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(
            work=Path(folder),
            device=device,
            gpu=gpu,
            rounds=chosen.rounds,
            say=lambda line: console.print(line, highlight=False),
        )
        for size, row in measure(bench, chosen.sizes, parts, steps=chosen.steps):
            results[size] = row
    if not chosen.no_save:
        console.print(f"written to {record.save(results).name}")
    return results


if __name__ == "__main__":
    raise SystemExit(any("failed" in row for row in main().values() if isinstance(row, dict)))
