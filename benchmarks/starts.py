"""`make bench-starts`: the time of a start, and the gains and costs of idle processes started in
advance.

Runs with and without idle processes take turns, so that other load affects both."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import tinker
from rich.console import Console
from tinker import types

from benchmarks import record
from benchmarks.recovery import IDLE_WITHIN, batch
from tandem.agent.launcher import ProcessLauncher
from tandem.demo.tiny_model import write_tiny_model
from tandem.protocol.worker import LoraSpec, TrainingSpec, WorkerKind, WorkerSpec
from tandem.protocol.worker_health import wait_until_serving
from tandem.settings.workers import SamplerSettings, TrainerSettings
from tandem.stack import Stack

KINDS: tuple[WorkerKind, WorkerKind] = ("trainer", "sampler")
MODEL = "bench/model"
_POLL_SECONDS = 0.05
_BESIDE_SECONDS = 1.0


async def start(launcher: ProcessLauncher, spec: WorkerSpec) -> dict[str, float]:
    """Return the seconds until a worker's address and its service, with the times in its log."""
    began = time.perf_counter()
    handle = await launcher.start(spec)
    address = time.perf_counter() - began
    if answer := await wait_until_serving(handle, timeout=spec.start_timeout):
        raise SystemExit(answer)
    found = {"address": address, "ready": time.perf_counter() - began}
    log = await asyncio.to_thread(Path(handle.log_path).read_text)
    for line in log.splitlines():
        if line.startswith("{"):
            found |= {k: v for k, v in json.loads(line).items() if k.endswith("_seconds")}
    await launcher.stop(spec.worker_id)
    return found


async def wait_until_idle_process(launcher: ProcessLauncher, kind: WorkerKind) -> int:
    """Return the pid of an idle process that can become a worker of this kind. Raises
    `TimeoutError`."""
    async with asyncio.timeout(IDLE_WITHIN):
        while not (pids := launcher.idle.pids(kind)):  # noqa: ASYNC110
            await asyncio.sleep(_POLL_SECONDS)
    return pids[0]


async def workers(work: Path, model: Path, *, rounds: int) -> list[dict[str, object]]:
    """Measure starts of workers alone, in idle processes and in new ones."""
    rows: list[dict[str, object]] = []
    without = ProcessLauncher(data_dir=work / "without")
    for kind in KINDS:
        found: dict[str, list[dict[str, float]]] = {"new process": [], "idle process": []}
        memory = 0
        for number in range(rounds):
            spec = WorkerSpec(
                worker_id=f"{kind}-{number}",
                kind=kind,
                secret="of the benchmark",
                model_name=MODEL,
                model_path=str(model),
                session_id="bench",
                training=TrainingSpec(lora=LoraSpec()) if kind == "trainer" else None,
                trainer=TrainerSettings() if kind == "trainer" else None,
                sampler=SamplerSettings() if kind == "sampler" else None,
            )
            found["new process"].append(await start(without, spec))
            with_pool = ProcessLauncher(data_dir=work / "with", pool={kind: 1})
            pid = await wait_until_idle_process(with_pool, kind)
            memory = psutil.Process(pid).memory_full_info().uss
            found["idle process"].append(await start(with_pool, spec))
            await with_pool.close()
        for name, starts in found.items():
            medians = {
                key: round(statistics.median(each[key] for each in starts), 2) for key in starts[0]
            }
            ready = sorted(round(each["ready"], 2) for each in starts)
            row = {"worker": kind, "in": name, **medians, "from": ready[0], "to": ready[-1]}
            rows.append(row | ({"idle_mib": memory >> 20} if name == "idle process" else {}))
    await without.close()
    return rows


@contextmanager
def stack(
    data_dir: Path, model: Path, *, pool: int
) -> Iterator[tuple[Stack, tinker.ServiceClient]]:
    settings = {"port": "0", "pool_processes": str(pool)}
    with Stack(data_dir=data_dir, settings=settings) as running:
        running.add_model(name=MODEL, path=model)
        endpoint = running.endpoint
        with tinker.ServiceClient(base_url=endpoint.url, api_key=endpoint.api_key) as service:
            yield running, service


def wait_until_idle(running: Stack) -> None:
    """Wait until the agent has logged an idle process of each kind."""
    log = running.data_dir / "logs" / "agent.log"
    while log.read_text().count("idle_process_ready") < len(KINDS):
        time.sleep(_POLL_SECONDS)


def clients(work: Path, model: Path, *, rounds: int) -> list[dict[str, object]]:
    """Measure a client's waiting time, from its first call on a long-running stack."""
    found: dict[int, list[tuple[float, float]]] = {0: [], 1: []}
    for number in range(rounds):
        for pool in found:
            with stack(work / f"clients-{number}-{pool}", model, pool=pool) as (running, service):
                if pool:
                    wait_until_idle(running)
                began = time.perf_counter()
                training = service.create_lora_training_client(MODEL).result()
                created = time.perf_counter() - began
                sampler = training.save_weights_and_get_sampling_client().result()
                prompt = types.ModelInput.from_ints([1, 2, 3])
                sampler.sample(prompt, 1, types.SamplingParams(max_tokens=1)).result()
                found[pool].append((created, time.perf_counter() - began))
    return [
        {
            "idle processes": pool,
            "a training client, s": [round(each[0], 1) for each in times],
            "until the first sample, s": [round(each[1], 1) for each in times],
        }
        for pool, times in found.items()
    ]


@contextmanager
def being_made(data_dir: Path) -> Iterator[None]:
    """Make idle processes during the block."""
    over = threading.Event()

    async def make() -> None:
        launcher = ProcessLauncher(data_dir=data_dir, pool=dict.fromkeys(KINDS, 8))
        await asyncio.to_thread(over.wait)
        await launcher.close()

    thread = threading.Thread(target=lambda: asyncio.run(make()))
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def send_to_idle_processes(number: signal.Signals) -> None:
    """Send a signal to all idle processes, finished or not, that this process made."""
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            if "--spec-fd" in child.cmdline():
                child.send_signal(number)


def beside(work: Path, model: Path, *, rounds: int) -> list[dict[str, object]]:
    """Measure a run's steps while idle processes are made, and every other second while they are
    stopped."""
    data = batch()
    rates: dict[str, list[float]] = {"alone": [], "while idle processes are made": []}
    with stack(work / "beside", model, pool=0) as (_running, service):
        training = service.create_lora_training_client(MODEL).result()

        def steps_per_second() -> float:
            began, steps = time.perf_counter(), 0
            while time.perf_counter() - began < _BESIDE_SECONDS:
                training.forward_backward(data, "cross_entropy").result()
                training.optim_step(types.AdamParams(learning_rate=1e-4)).result()
                steps += 1
            return steps / (time.perf_counter() - began)

        steps_per_second()
        with being_made(work / "made"):
            for _ in range(10 * rounds):
                rates["while idle processes are made"].append(steps_per_second())
                send_to_idle_processes(signal.SIGSTOP)
                rates["alone"].append(steps_per_second())
                send_to_idle_processes(signal.SIGCONT)
    return [
        {
            "a run": what,
            "steps a second, median": round(statistics.median(found), 2),
            "mean": round(statistics.mean(found), 2),
            "seconds": len(found),
        }
        for what, found in rates.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.starts", description=__doc__)
    parser.add_argument("sections", nargs="*", default=["workers", "clients", "beside"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-save", action="store_true", help="only print")
    arguments = parser.parse_args()
    console = Console(width=160)
    results: dict[str, object] = {"machine": record.machine()}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        model = work / "model"
        write_tiny_model(model, seed=0)
        for section in arguments.sections:
            if section == "workers":
                rows = asyncio.run(workers(work, model, rounds=arguments.rounds))
            else:
                measure = {"clients": clients, "beside": beside}[section]
                rows = measure(work, model, rounds=arguments.rounds)
            results[section] = {"load": round(os.getloadavg()[0], 1), "rows": rows}
            console.print(results[section])
    if not arguments.no_save:
        console.print(f"Written to {record.save(results).name}")


if __name__ == "__main__":
    main()
