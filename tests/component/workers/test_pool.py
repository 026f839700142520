"""Idle processes that become workers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import pytest

from tandem.agent import pool as pools
from tandem.agent.launcher import ProcessLauncher
from tandem.agent.pool import pool_sizes, seconds_until_the_next
from tandem.agent.worker_process import group_members
from tandem.errors import WorkerStartFailed
from tandem.protocol.worker import WorkerKind, WorkerSpec
from tandem.settings.workers import PoolSettings, TrainerSettings
from tests.support.waiting import PATIENCE, until, until_serving, wait_until

DUMMY = str(Path(__file__).parents[2] / "support" / "dummy_worker.py")
SECRET = "the-secret-of-this-worker"


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """An idle process has low priority, and needs time to answer."""
    monkeypatch.setattr(pools, "_HAND_OVER_SECONDS", PATIENCE)


@contextlib.asynccontextmanager
async def launching(
    data_dir: Path,
    behaviour: str = "serve",
    *,
    command: list[str] | None = None,
    pool: Mapping[WorkerKind, int] | None = None,
):
    """A launcher with dummy workers. `pool` defaults to one idle process."""
    chosen = command or [sys.executable, DUMMY, behaviour]
    sizes: Mapping[WorkerKind, int] = {"trainer": 1} if pool is None else pool
    launcher = ProcessLauncher(data_dir=data_dir, command=lambda _: chosen, pool=sizes)
    try:
        yield launcher
    finally:
        await launcher.close()


def spec(worker_id: str = "trainer-s-1-0", **changes: object) -> WorkerSpec:
    made = WorkerSpec(
        worker_id=worker_id,
        kind="trainer",
        secret=SECRET,
        model_name="tiny",
        model_path="models/tiny",
        session_id="s-1",
        run_id="s-1:train:0",
        start_timeout=60,
    )
    return made.model_copy(update=changes)


async def idle_one(launcher: ProcessLauncher) -> int:
    """The only idle process for trainers."""

    def one() -> int:
        pids = launcher.idle.pids("trainer")
        return pids[0] if len(pids) == 1 else 0

    return await until(one, what="one process is idle")


async def pid_of_started(launcher: ProcessLauncher, worker: WorkerSpec) -> int:
    return (await launcher.start(worker)).pid


def arguments_and_environment(pid: int) -> bytes:
    return b"".join(Path(f"/proc/{pid}/{file}").read_bytes() for file in ("cmdline", "environ"))


def pipes(pid: int) -> set[str]:
    links = set()
    for each in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the process has closed it
            links.add(str(each.readlink()))
    return {link for link in links if link.startswith("pipe:")}


async def test_an_idle_process_becomes_the_worker_and_is_replaced_when_that_is_ready(tmp_path):
    async with launching(tmp_path) as launcher:
        first = await idle_one(launcher)
        assert await pid_of_started(launcher, spec()) == first
        assert launcher.idle.pids("trainer") == []
        assert not launcher._quiet()  # it starts, and needs the processors
        assert await idle_one(launcher) != first


async def test_as_many_processes_wait_as_engines_started_within_a_minute(tmp_path, monkeypatch):
    async with launching(tmp_path, pool={"sampler": 1}) as launcher:
        for number in range(2):
            engine = spec(f"sampler-s-1-{number}", kind="sampler", run_id="")
            await until_serving(await launcher.start(engine))
        await until(lambda: len(launcher.idle.pids("sampler")) == 2)
        for number in range(2, 7):
            await launcher.start(spec(f"sampler-s-1-{number}", kind="sampler", run_id=""))
        assert launcher.idle._size("sampler") == 4
        monkeypatch.setattr(pools, "_RECENT_SECONDS", 0.0)
        assert launcher.idle._size("sampler") == 1


async def test_nobody_is_told_of_idle_processes(tmp_path):
    async with launching(tmp_path) as launcher:
        watch = launcher.watch()
        os.kill(await idle_one(launcher), signal.SIGKILL)
        await until(lambda: not launcher.idle.pids("trainer"))
        assert launcher.ids() == ()
        assert await launcher.list() == []
        await launcher.close()
        assert [end async for end in watch] == []


async def test_the_log_of_a_worker_that_was_idle_is_its_own(tmp_path, capfd):
    async with launching(tmp_path, "polite") as launcher:
        await idle_one(launcher)
        assert "preloaded" in capfd.readouterr().err.splitlines()  # the agent's output
        await launcher.start(spec())
        await launcher.stop("trainer-s-1-0")
    about, said = (tmp_path / "logs" / "trainer-s-1-0.log").read_text().splitlines()
    assert json.loads(about)["run_id"] == "s-1:train:0"
    assert said == "goodbye"


async def test_the_secret_of_a_worker_that_was_idle_is_in_no_argument_and_no_environment(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("TANDEM_API_KEY", "tml-key")
    async with launching(tmp_path) as launcher:
        pid = await pid_of_started(launcher, spec())
        seen = arguments_and_environment(pid)
        assert SECRET.encode() not in seen
        assert b"tml-key" not in seen


async def test_a_worker_that_was_idle_holds_its_own_lifeline_and_report_alone(tmp_path):
    async with launching(tmp_path, pool={"trainer": 2}) as launcher:
        await until(lambda: len(launcher.idle.pids("trainer")) == 2)
        links = []
        for name in ("a", "b"):
            links.append(pipes(await pid_of_started(launcher, spec(name))))
        assert [len(each) for each in links] == [2, 2]
        assert len(set.union(*links)) == 4


async def test_of_two_starts_at_once_one_gets_the_idle_process_and_one_its_own(tmp_path):
    async with launching(tmp_path) as launcher:
        idle = await idle_one(launcher)
        pids = await asyncio.gather(*(pid_of_started(launcher, spec(name)) for name in "ab"))
        assert idle in pids
        assert len(set(pids)) == 2
        await asyncio.gather(*map(until_serving, await launcher.list()))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_start_that_meets_a_dead_or_frozen_process_gets_one_of_its_own(
    tmp_path, monkeypatch, number
):
    monkeypatch.setattr(pools, "_HAND_OVER_SECONDS", 0.2)
    async with launching(tmp_path) as launcher:
        idle = await idle_one(launcher)
        os.kill(idle, number)
        assert await pid_of_started(launcher, spec()) != idle
        assert group_members(idle) == []
        await until_serving(*await launcher.list())


async def test_a_start_that_is_cancelled_while_it_hands_over_leaves_nothing(tmp_path):
    async with launching(tmp_path) as launcher:
        idle = await idle_one(launcher)
        os.kill(idle, signal.SIGSTOP)
        starting = asyncio.create_task(launcher.start(spec()))
        await until(lambda: not launcher.idle.pids("trainer"))
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        await until(lambda: group_members(idle) == [])
        assert launcher.ids() == ()


async def test_what_is_reported_to_a_start_is_what_the_worker_says(tmp_path):
    async with launching(tmp_path, "refuse") as launcher:
        await idle_one(launcher)
        with pytest.raises(WorkerStartFailed, match="did not start: rank 1 was killed by SIGKILL"):
            await launcher.start(spec())


async def test_an_idle_process_that_ends_is_replaced(tmp_path):
    async with launching(tmp_path) as launcher:
        pid = await idle_one(launcher)
        os.kill(pid, signal.SIGKILL)
        await until(lambda: not launcher.idle.pids("trainer"))
        assert launcher.idle._not_before["trainer"] > 0
        assert await idle_one(launcher) != pid


def test_each_process_that_ends_by_itself_is_replaced_later_than_the_one_before():
    assert [seconds_until_the_next(ends) for ends in (1, 2, 3, 9, 10, 99)] == [
        *(2, 4, 8, 512),
        *(600, 600),
    ]


@pytest.mark.parametrize("command", [[sys.executable, "-c", "raise SystemExit(3)"], ["/no/such"]])
async def test_processes_that_never_get_idle_are_no_storm_and_stop_no_worker(tmp_path, command):
    async with launching(tmp_path, command=command) as launcher:
        await until(lambda: launcher.idle._ends["trainer"] >= 1)
        with pytest.raises(WorkerStartFailed):
            await launcher.start(spec())


async def test_without_free_memory_no_process_is_kept(tmp_path, monkeypatch):
    looked = []
    monkeypatch.setattr(pools, "_LEAST_FREE_BYTES", 2**62)
    monkeypatch.setattr(ProcessLauncher, "_quiet", lambda _: not looked.append(1))
    async with launching(tmp_path) as launcher:
        await until(lambda: len(looked) > 1, what="it has looked whether it may add one")
        assert launcher.idle.pids("trainer") == []


async def test_a_trainer_of_another_packages_backend_is_started_from_nothing(tmp_path):
    async with launching(tmp_path) as launcher:
        idle = await idle_one(launcher)
        other = spec(trainer=TrainerSettings(backend="of-a-package"))
        assert await pid_of_started(launcher, other) != idle
        assert launcher.idle.pids("trainer") == [idle]


async def test_closing_ends_idle_processes_and_those_that_get_ready(tmp_path):
    async with launching(tmp_path) as launcher:
        idle = await idle_one(launcher)
    assert group_members(idle) == []
    async with launching(tmp_path, pool={}) as launcher:
        assert await pid_of_started(launcher, spec())
        assert launcher.idle.pids("trainer") == []


def test_an_agent_keeps_as_many_idle_processes_of_each_kind_as_the_setting_says():
    assert pool_sizes(PoolSettings(processes=2)) == {"trainer": 2, "sampler": 2}
    assert pool_sizes(PoolSettings(processes=0)) == {}


def test_there_are_no_idle_processes_of_a_service_that_is_not_installed(monkeypatch):
    def found(name: str) -> object:
        return None if name == "trainer_service" else find_spec(name)

    monkeypatch.setattr(pools, "find_spec", found)
    assert pool_sizes(PoolSettings(processes=1)) == {"sampler": 1}


AGENT = """
import asyncio, sys
from pathlib import Path
from tandem.agent.launcher import ProcessLauncher

async def main():
    command = [sys.executable, sys.argv[1], "serve"]
    launcher = ProcessLauncher(
        data_dir=Path(sys.argv[2]), command=lambda _: command, pool={"trainer": 2}
    )
    while len(pids := launcher.idle.pids("trainer")) < 2:
        await asyncio.sleep(0.01)
    print("idle", *pids, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def test_idle_processes_end_with_an_agent_that_is_killed_even_if_they_are_frozen(tmp_path):
    agent = subprocess.Popen(
        [sys.executable, "-c", AGENT, DUMMY, str(tmp_path)], stdout=subprocess.PIPE
    )
    try:
        line = b""
        while not line.startswith(b"idle"):
            line = agent.stdout.readline()
            assert line, "the agent ended"
        pids = [int(word) for word in line.split()[1:]]
        os.kill(pids[0], signal.SIGSTOP)
    finally:
        agent.kill()
        agent.wait()
        agent.stdout.close()
    wait_until(lambda: not any(map(group_members, pids)), what="the idle processes have ended")
