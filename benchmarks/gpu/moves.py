"""The speed at which workers leave a GPU and return, beside that of plain copies.

- `trainers`: a trainer does a step with all parameters, then sleeps and wakes a few times. Plain
  copies between the GPU and pinned host memory run in the same minutes.
- `engines`: an engine loads the trainer's weights from before and after a step in turn, and sleeps
  and wakes too.
- `wakes`: an engine with nine tenths of the device drops its weights and wakes, 50 times.
- `together`: two experiments share the device, beside the same two in a row."""

from __future__ import annotations

import json
import statistics
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from benchmarks.gpu.sizes import SIZES, parameters_of
from benchmarks.gpu.speed import engine_spec
from benchmarks.gpu.workers import (
    CALL_SECONDS,
    MODEL,
    Bench,
    Caller,
    elsewhere,
    publish,
    rate,
    step,
    torch_device,
    trainer_spec,
    worker,
)
from tandem.agent.suspender import CudaCheckpoint, uses_gpu
from tandem.agent.worker_process import group_members
from tandem.errors import SuspendFailed
from tandem.settings.workers import SamplerSettings
from tandem.v1 import common_pb2, sampler_pb2

_KV_CACHE_BYTES = 4 * 2**30
_WAKES = 50


def copies(device: str, *, size: int, rounds: int) -> dict[str, float]:
    """Return the median GB/s of copies to host memory (pinned, on a GPU), and back."""
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
        found[name] = rate(size, statistics.median(seconds))
    return found


def arrivals(files: Path, device: str, *, rounds: int) -> dict[str, float]:
    """Return the median GB/s from the page cache to the device: mapped, and staged like an
    engine's."""
    import torch

    from sampler_service.weights.files import read_tensors
    from sampler_service.weights.staging import pinned, staged, staging_threads

    there = torch.device(device)
    allocate = pinned if there.type == "cuda" else partial(torch.empty, dtype=torch.uint8)
    found = {}
    for name, threads in {"mapped": 0, "staged": staging_threads("cuda", workers=1)}.items():
        seconds = []
        for _ in range(rounds + 1):
            began, size = time.perf_counter(), 0
            with staged(read_tensors(files), threads=threads, allocate=allocate) as tensors:
                for _, tensor in tensors:
                    size += torch.empty_like(tensor, device=there).copy_(tensor).nbytes
            seconds.append(time.perf_counter() - began)
        found[name] = rate(size, statistics.median(seconds[1:]))
    return found


async def sleeps(
    bench: Bench, worker: Caller, *, before: int, level: int = 0, times: int = 0
) -> dict[str, float | int]:
    """Let a worker sleep and wake, some `times` (0: once more than `bench.rounds`). The first
    time, with new buffers, is reported apart.

    `before` is the device's use before the worker."""
    awake, left, moved, host = bench.used_bytes(worker.pid) - before, [], 0, 0
    slept, woken = [], []
    for _ in range(times or bench.rounds + 1):
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
        "device_bytes_grown": left[-1] - left[0],
        "first_sleep_seconds": round(slept[0], 3),
        "sleep_seconds": round(out, 3),
        "wake_seconds": round(back, 3),
        "switch_seconds": round(out + back, 3),
        "longest_wake_seconds": round(max(woken), 3),
        "sleep_gb_per_second": rate(moved, out),
        "wake_gb_per_second": rate(moved, back),
    }


async def suspended(bench: Bench, worker: Caller, *, before: int) -> dict[str, float | int | str]:
    """Let the host suspend and resume an awake worker, which may break it, or say why it cannot."""
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
        await suspender.suspend(pids, timeout=CALL_SECONDS)
        out.append(time.perf_counter() - began)
        left.append(bench.used_bytes(worker.pid) - before)
        began = time.perf_counter()
        await suspender.resume(pids, timeout=CALL_SECONDS)
        back.append(time.perf_counter() - began)
    return {
        "suspend_seconds": round(statistics.median(out), 3),
        "resume_seconds": round(statistics.median(back), 3),
        "device_bytes_left": max(left),
    }


async def trainers(bench: Bench, size: str, model: Path) -> dict[str, object]:
    bench.say(f"{size}: a trainer of all parameters starts")
    size_of_copies = 4 * 2**30 if bench.gpu is not None else 64 * 2**20
    plain = elsewhere(bench, copies, torch_device(bench), size=size_of_copies, rounds=bench.rounds)
    before = bench.used_bytes(0) if bench.gpu is not None else 0
    async with worker(bench, trainer_spec(bench, size, model)) as trainer:
        await step(trainer, size)
        about = await trainer.describe()
        found: dict[str, object] = {
            "parameters": about.parameters,
            "copies_gb_per_second": plain,
        }
        moved = await sleeps(bench, trainer, before=before)
        found |= moved
        found["sleep_of_copies"] = round(moved["sleep_gb_per_second"] / plain["out"], 2)
        found["wake_of_copies"] = round(moved["wake_gb_per_second"] / plain["in"], 2)
        bench.say(json.dumps(found))
        found["suspended"] = await suspended(bench, trainer, before=before)
        bench.say(json.dumps(found["suspended"]))
    return found


async def _two_versions(bench: Bench, size: str, model: Path) -> list[common_pb2.WeightVersion]:
    """Publish a trainer's weights before and after a step."""
    async with worker(bench, trainer_spec(bench, size, model)) as trainer:
        published = []
        for number in (1, 2):
            published.append((await publish(bench, trainer, number)).version)
            await step(trainer, size)
    return published


async def engines(bench: Bench, size: str, model: Path) -> dict[str, object]:
    """Measure an engine that loads two versions in turn, and sleeps at each level."""
    versions = await _two_versions(bench, size, model)
    bench.say(f"{size}: an engine starts")
    before = bench.used_bytes(0) if bench.gpu is not None else 0
    weights = 2 * parameters_of(size)
    settings = SamplerSettings(
        max_model_len=min(2048, SIZES[size].max_length),
        max_num_seqs=64,
        kv_cache_bytes=64 * 2**20,
        gpu_memory_bytes=weights + 2 * _KV_CACHE_BYTES if bench.gpu is not None else 0,
    )
    began = time.perf_counter()
    async with worker(bench, engine_spec(bench, size, model, settings)) as engine:
        found: dict[str, object] = {"start_seconds": round(time.perf_counter() - began, 1)}
        replies = []
        for number in range(2 * bench.rounds):
            version = versions[number % len(versions)]
            replies.append(await engine.call("Load", sampler_pb2.LoadRequest(version=version)))
        seconds = statistics.median(reply.seconds for reply in replies)
        found |= {
            "weights_bytes": replies[-1].bytes,
            "reload_seconds": round(seconds, 3),
            "reload_gb_per_second": rate(replies[-1].bytes, seconds),
            "first_reload_seconds": round(replies[0].seconds, 3),
            "canary_difference": round(max(reply.canary_difference for reply in replies), 5),
        }
        for level in (1, 2):
            found[f"sleep level {level}"] = await sleeps(bench, engine, before=before, level=level)
        bench.say(json.dumps(found))
    arrived = elsewhere(
        bench, arrivals, Path(versions[0].path), torch_device(bench), rounds=bench.rounds
    )
    bench.say(f"from the page cache, GB/s: {json.dumps(arrived)}")
    return found | {"arrivals_gb_per_second": arrived}


async def wakes(bench: Bench, size: str, model: Path) -> dict[str, object]:
    """Let an engine with nine tenths of the device drop its weights and wake many times."""
    bench.say(f"{size}: an engine with nine tenths of the device wakes")
    times = _WAKES if bench.gpu is not None else 3
    before = bench.used_bytes(0) if bench.gpu is not None else 0
    settings = SamplerSettings(
        max_model_len=min(2048, SIZES[size].max_length),
        kv_cache_bytes=64 * 2**20,
        gpu_memory_utilization=0.9,
    )
    async with worker(bench, engine_spec(bench, size, model, settings)) as engine:
        moved = await sleeps(bench, engine, before=before, level=2, times=times)
    found: dict[str, object] = {"wakes": times, **moved}
    if bench.gpu is not None:
        found["left_percent"] = round(100 * moved["device_bytes_left"] / bench.gpu.memory_bytes, 2)
    bench.say(json.dumps(found))
    return found


def together(bench: Bench, size: str, model: Path) -> dict[str, object]:
    """Measure two experiments that share the device in turns, beside the same two in a row."""
    import tinker

    from benchmarks.timeslice import Experiment, at_once, in_a_row, list_groups, switches
    from tandem.stack import Stack

    bench.say(f"{size}: two experiments share the device")
    group = {"name": "cores", "devices": [bench.device], "roles": ["trainer", "sampler"]}
    settings = {
        "port": "0",
        # A machine of one GPU has such a group without being told.
        "groups": json.dumps([] if bench.gpu is not None else [group]),
        "sampler_max_num_seqs": "64",
        "sampler_kv_cache_bytes": str(64 * 2**20),
        "pool_processes": "0",
    }
    with ExitStack() as until_the_end:
        stack = until_the_end.enter_context(Stack(data_dir=bench.work / "data", settings=settings))
        stack.add_model(name=MODEL, path=model)
        experiments = []
        for owner in ("one", "two"):  # two owners share no trainer
            with stack.client() as client:
                body = {"owner": owner, "role": "member", "name": "bench"}
                key = client.post("keys", json=body).raise_for_status().json()["key"]
            service = until_the_end.enter_context(
                tinker.ServiceClient(base_url=stack.endpoint.url, api_key=key)
            )
            experiments.append(Experiment(service, model=MODEL, tokens=48, repeats=4))
            experiments[-1].step()
        began = time.perf_counter()
        in_a_row(experiments, bench.steps)
        serial, before = time.perf_counter() - began, list_groups(stack)
        began = time.perf_counter()
        at_once(experiments, bench.steps)
        both = time.perf_counter() - began
        found = {
            "steps": bench.steps,
            "serial_seconds": round(serial, 2),
            "together_seconds": round(both, 2),
            "makespan_over_serial": round(both / serial, 3),
            "leases": switches(before, list_groups(stack)),
        }
    bench.say(json.dumps(found))
    return found
