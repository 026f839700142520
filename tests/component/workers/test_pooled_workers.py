"""A trainer and an engine in idle processes that imported everything."""

from __future__ import annotations

import asyncio
import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import pytest

from tandem.agent.launcher import ProcessLauncher
from tandem.agent.pool import _NICENESS
from tandem.protocol.worker import WorkerHandle, WorkerKind, WorkerReport, WorkerSpec
from tandem.settings.workers import SamplerSettings, TrainerSettings
from tests.support.processes import cores_of
from tests.support.sampler_worker import PROMPT, SamplerClient, assert_computed_by
from tests.support.tiny_model import write_tiny_model
from tests.support.trainer_worker import TrainerClient, datum, logprobs_of, request
from tests.support.waiting import PATIENCE, until, until_serving
from tests.support.worker_process import RUN, SECRET, SESSION, Started


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny", head_dim=32)


CORE = max(os.sched_getaffinity(0))


def spec(kind: WorkerKind, model: Path, worker_id: str) -> WorkerSpec:
    return WorkerSpec(
        worker_id=worker_id,
        kind=kind,
        secret=SECRET,
        model_name="tiny",
        model_path=str(model),
        session_id=SESSION,
        run_id=RUN if kind == "trainer" else "",
        devices=(f"cpu:{CORE}",),
        trainer=TrainerSettings(device="cpu", threads=1) if kind == "trainer" else None,
        sampler=(
            SamplerSettings(device="cpu", kv_cache_bytes=64 * 2**20, engine_process="on")
            if kind == "sampler"
            else None
        ),
    )


@dataclass
class Running:
    """A serving worker. `was_idle`: its process is older."""

    handle: WorkerHandle
    pid: int
    log: str
    was_idle: bool

    @property
    def started(self) -> Started:
        return Started(None, None, WorkerReport(address=self.handle.address))


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """Beside other tests, idle processes need processors and time to answer."""
    monkeypatch.setattr("tandem.agent.pool._IMPORTING_NICENESS", 3)
    monkeypatch.setattr("tandem.agent.pool._HAND_OVER_SECONDS", PATIENCE)


@contextlib.asynccontextmanager
async def launching(data_dir: Path, kind: WorkerKind):
    """Yields a function that starts workers. The first takes an idle process."""
    launcher = ProcessLauncher(data_dir=data_dir, pool={kind: 1})

    async def start(worker: WorkerSpec) -> Running:
        idle = launcher.idle.pids(kind)
        handle = await launcher.start(worker)
        await until_serving(handle)
        return Running(handle, handle.pid, text_of(handle.log_path), handle.pid in idle)

    try:
        await until(lambda: launcher.idle.pids(kind), what="one is idle")
        yield start
    finally:
        await launcher.close()


def text_of(path: str) -> str:
    return Path(path).read_text()


def niceness(pid: int) -> set[int]:
    """Niceness of the threads and, where sessions have one, of the session."""
    process = Path(f"/proc/{pid}")
    threads = set()
    for each in (process / "task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # a thread that ended meanwhile
            threads.add(os.getpriority(os.PRIO_PROCESS, int(each.name)))
    session = process / "autogroup"
    return threads | ({int(session.read_text().split()[-1])} if session.exists() else set())


def usual_niceness() -> set[int]:
    """Niceness of a worker that was never idle (above its agent's), and of its session."""
    return {os.getpriority(os.PRIO_PROCESS, 0) + _NICENESS, _NICENESS}


async def test_a_trainer_that_was_idle_computes_what_one_that_was_not_does(tmp_path, model):
    data = [datum([5, 9, 30, 41, 7]), datum([3, 8])]

    def computed(worker: Running) -> list[np.ndarray]:
        with TrainerClient(worker.started) as client:
            first = client.output(request(data))
            client.optim_step()
            return [*logprobs_of(first), *logprobs_of(client.output(request(data)))]

    async with launching(tmp_path, "trainer") as start:
        pooled = await start(spec("trainer", model, "pooled"))
        spawned = await start(spec("trainer", model, "spawned"))
        assert (pooled.was_idle, spawned.was_idle) == (True, False)
        one, other = [await asyncio.to_thread(computed, each) for each in (pooled, spawned)]
        assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))
        assert '"event":"ready"' in pooled.log
        assert niceness(pooled.pid) <= usual_niceness()
        assert cores_of(pooled.pid) == {CORE}


async def test_an_engine_that_was_idle_samples_from_its_model(tmp_path, model):
    """The engine's own process is forked from the idle one."""

    def sampled(worker: Running) -> None:
        with SamplerClient(worker.started, model) as client:
            answer = client.sample(PROMPT, seed=2, max_tokens=20, stop=[], prompt_logprobs=True)
            assert_computed_by(model, PROMPT, answer)

    async with launching(tmp_path, "sampler") as start:
        pooled = await start(spec("sampler", model, "pooled"))
        assert pooled.was_idle
        await asyncio.to_thread(sampled, pooled)
        assert '"event":"ready"' in pooled.log
        (engine,) = psutil.Process(pooled.pid).children()
        for pid in (pooled.pid, engine.pid):
            assert niceness(pid) <= usual_niceness()
            assert cores_of(pid) == {CORE}
