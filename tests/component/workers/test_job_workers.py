"""Jobs through a real agent, and under the real torchrun."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from gateway.metrics import Metrics
from gateway.workers.epoch import Epoch
from gateway.workers.groups import EVERYTHING, WorkerGroup
from gateway.workers.job_adapter import JobAdapter
from gateway.workers.launchers.agent import AgentLauncher
from gateway.workers.launchers.base import for_each_kind
from gateway.workers.processes import Processes
from gateway.workers.requests import WorkerRequest
from gateway.workers.roster import Roster
from gateway.workers.supervisor import Supervisor
from gateway.workers.table import WorkerRow
from tandem.agent.launcher import ProcessLauncher
from tandem.agent.scratch import ScratchFolders
from tandem.agent.service import serving
from tandem.backends.jobs import STOPPED, JobEnd
from tandem.protocol.worker import JobSpec, WorkerSpec
from tandem.settings.gateway import GatewaySettings
from tandem.settings.sharing import SharingSettings
from tests.support.cuda_checkpoint import Machine
from tests.support.gateway.memory_table import MemoryTable
from tests.support.processes import Process, marked
from tests.support.waiting import PATIENCE, until, wait_until

MARK = "TEST_OF_JOBS"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")

ADDS = """
import json, os, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(total)
said = {"world": dist.get_world_size(), "total": total.item(), "omp": os.environ["OMP_NUM_THREADS"]}
with open(f"rank-{dist.get_rank()}.json", "w") as file:
    json.dump(said, file)
print(f"rank {dist.get_rank()} has added\\n", end="", flush=True)
dist.destroy_process_group()
"""

RECORDS = """
more = {"py_callstack": "", "timestamp": "1"}
message = {"message": {"message": "ValueError: no such row", "extraInfo": more}}
with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
    json.dump(message, file)
raise SystemExit(3)
"""
"""Records an error as `torch.distributed.elastic.multiprocessing.errors.record` does."""

DETACHES = """
import subprocess, sys, time
code = "import time; open('up', 'w'); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
time.sleep(600)
"""
"""Starts a rank that does not ask the kernel to end with its parent."""


@dataclass
class JobOwner:
    """Describes the worker of a job."""

    folder: Path
    argv: tuple[str, ...]
    processes: int = 2

    def specification(self, row: WorkerRow, group: WorkerGroup) -> WorkerSpec:
        return WorkerSpec(
            worker_id="",
            secret="",
            kind="job",
            session_id=row.session,
            run_id=row.key,
            model_name="tiny",
            model_path="tiny",
            job=JobSpec(
                framework="test",
                folder=str(self.folder),
                processes=self.processes,
                argv=self.argv,
                environment={MARK: str(self.folder)},
            ),
        )


CORES = WorkerGroup(name="g", kinds=EVERYTHING, on_host=True, most_ranks=2)
SUSPENDING = WorkerGroup(name="g", kinds=EVERYTHING, devices=("cuda:GPU-a",), no_suspender="")


class JobWorld:
    """A supervisor of jobs on one group, and the agent of a data directory."""

    def __init__(self, data_dir: Path, group: WorkerGroup) -> None:
        epoch = Epoch(number=1, superseded=lambda: None)
        launcher = AgentLauncher(data_dir=data_dir, timeout=PATIENCE, epoch=epoch)
        self.processes = Processes(
            settings=GatewaySettings(data_dir=data_dir),
            launchers=for_each_kind(launcher),
            metrics=Metrics(),
            epoch=epoch,
        )
        self.adapter = JobAdapter(self.processes)
        self.supervisor = Supervisor(
            Roster(
                table=MemoryTable(),
                groups=[group],
                adapters={"job": self.adapter},
                settings=SharingSettings(),
                epoch=1,
                clock=asyncio.get_running_loop().time,
            )
        )

    async def start(self, owner: JobOwner, key: str = "j") -> tuple[int, asyncio.Future[str]]:
        """Place and start a job. Return the process of its worker, and its coming end."""
        ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.adapter.register(key, owner)
        ranks = owner.processes
        request = WorkerRequest(key=key, kind="job", owner="ann", session="s-1", ranks=ranks)
        await self.supervisor.place([request], holder=key)
        self.supervisor.watch_ends(key, lambda _, reason: ended.set_result(reason))
        return await self.turn(key), ended

    async def turn(self, key: str) -> int:
        """Return the process of a job's worker when the job has the devices."""
        async with asyncio.timeout(PATIENCE), self.supervisor.use(key) as row:
            return self.adapter.require(row).handle.pid


@pytest.fixture
def folder(tmp_path):
    found = tmp_path / "data/jobs/j"
    found.mkdir(parents=True)
    return found


@pytest.fixture
async def world(tmp_path, folder):
    async with _world(ProcessLauncher(data_dir=tmp_path / "data"), CORES) as found:
        yield found


@asynccontextmanager
async def _world(agent: ProcessLauncher, group: WorkerGroup):
    async with serving(agent, data_dir=agent.data_dir):
        found = JobWorld(agent.data_dir, group)
        await found.processes.find_processes(found.supervisor)
        await found.supervisor.open()
        yield found
        await found.supervisor.close()
        await found.processes.close(leaving=True)


def end_of(folder: Path) -> JobEnd:
    return JobEnd.model_validate_json((folder / "attempt-1/end.json").read_bytes())


@pytest.mark.slow
async def test_a_job_of_two_ranks_under_torchrun_is_one_job_from_its_request_to_its_end(
    world, folder
):
    (folder / "program.py").write_text(ADDS)
    _, ended = await world.start(JobOwner(folder, (*TORCHRUN, str(folder / "program.py"))))
    reason = await asyncio.wait_for(ended, PATIENCE)
    assert reason.startswith("the job exited with status 0")
    assert (end_of(folder).status, end_of(folder).reason) == (0, "")
    said = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]
    cores = str(max(1, len(os.sched_getaffinity(0)) // 2))
    assert said == [{"world": 2, "total": 3.0, "omp": cores}] * 2
    (log,) = (folder.parents[1] / "logs").glob("job-s-1-*.log")
    assert "rank 0 has added" in log.read_text() and "rank 1 has added" in log.read_text()
    assert world.supervisor.roster.rows["j"].state == "placed"
    assert not marked(f"{MARK}={folder}")


@pytest.mark.slow
@pytest.mark.parametrize("recorded", [False, True])
async def test_torchruns_end_names_the_failed_rank_and_its_error(world, folder, recorded):
    fails = "import json, os, signal, time\nif os.environ['RANK'] == '0': time.sleep(600)\n"
    if recorded:
        fails += RECORDS
        said = "rank 1 ended with status 3: ValueError: no such row"
    else:
        fails += "print('rows were read', flush=True)\nos.kill(os.getpid(), signal.SIGKILL)"
        said = "rank 1 was killed by SIGKILL: rows were read"
    (folder / "program.py").write_text(fails)
    _, ended = await world.start(JobOwner(folder, (*TORCHRUN, str(folder / "program.py"))))
    await asyncio.wait_for(ended, PATIENCE)
    assert (end_of(folder).status, end_of(folder).reason) == (1, said)
    assert not marked(f"{MARK}={folder}")


async def test_nothing_of_a_killed_job_is_left_when_its_end_is_reported(world, folder):
    pid, ended = await world.start(JobOwner(folder, (sys.executable, "-c", DETACHES)))
    await until((folder / "up").exists)
    os.kill(pid, signal.SIGKILL)
    assert (await asyncio.wait_for(ended, PATIENCE)).startswith("the job was killed by SIGKILL")
    assert not marked(f"{MARK}={folder}")
    assert not (folder / "attempt-1/end.json").exists()


async def test_a_released_job_is_asked_to_end_and_leaves_nothing(world, folder):
    await world.start(JobOwner(folder, (sys.executable, "-c", DETACHES)))
    await until((folder / "up").exists)
    async with asyncio.timeout(PATIENCE):
        await world.supervisor.release("j", holder="j")
    assert end_of(folder).status == STOPPED
    assert not marked(f"{MARK}={folder}")


async def test_the_ranks_of_jobs_are_suspended_in_turn_and_leave_nothing(tmp_path, monkeypatch):
    machine = Machine(tmp_path / "machine")
    uses_gpu = lambda pid: (machine.folder / str(pid)).exists()  # noqa: E731
    monkeypatch.setattr("tandem.agent.launcher.uses_gpu", uses_gpu)
    agent = ProcessLauncher(data_dir=tmp_path / "data", suspender=machine.suspender)
    ranks, folders = [], [tmp_path / "data/jobs" / key for key in "jk"]
    for folder in folders:
        folder.mkdir(parents=True)
    async with _world(agent, SUSPENDING) as world:
        rows = world.supervisor.roster.rows
        for key, folder in zip("jk", folders, strict=True):
            owner = JobOwner(folder, (sys.executable, "-c", DETACHES), processes=1)
            await world.start(owner, key)
            await until((folder / "up").exists)
            (rank,) = [each.pid for each in _of(folder) if each.group == each.pid]
            machine.add(rank)
            ranks.append(rank)
        assert (rows["j"].state, machine.states(*ranks)) == ("asleep", ["checkpointed", "running"])
        worker = world.adapter.require(rows["j"])
        await worker.check_health(timeout=PATIENCE)
        await world.turn("j")
        assert (rows["k"].state, machine.states(*ranks)) == ("asleep", ["running", "checkpointed"])
        async with asyncio.timeout(PATIENCE):
            await world.supervisor.release("k", holder="k")
        assert not _of(folders[1])
        assert not (folders[1] / "attempt-1/end.json").exists(), "it was killed at once"
        async with asyncio.timeout(PATIENCE):
            await world.supervisor.release("j", holder="j")
    assert end_of(folders[0]).status == STOPPED
    assert not _of(folders[0])


def _of(folder: Path) -> list[Process]:
    return marked(f"{MARK}={folder}")


def test_the_next_agent_ends_the_ranks_of_a_killed_agents_job(tmp_path):
    scratches = ScratchFolders(tmp_path)
    mine, other = scratches.make(), tmp_path / "other"
    command = [sys.executable, "-c", "import time; time.sleep(600)"]

    def started(temporary: Path) -> subprocess.Popen[bytes]:
        environment = os.environ | {"TMPDIR": str(temporary)}
        return subprocess.Popen(command, env=environment, start_new_session=True)

    worker, rank, stranger = started(mine), started(mine), started(other)
    try:
        scratches.note_pid(mine, worker.pid)
        wait_until(lambda: len(marked(f"TMPDIR={mine}")) == 2)
        wait_until(lambda: marked(f"TMPDIR={other}"))
        scratches.end_strays()
        assert rank.wait(60) == -signal.SIGKILL
        assert (worker.poll(), stranger.poll()) == (None, None)
    finally:
        for process in (worker, rank, stranger):
            process.kill()
            process.wait()
        scratches.remove_all()
