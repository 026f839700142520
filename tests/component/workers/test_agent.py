"""An agent, and a gateway that comes and goes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import gateway.workers.launchers.agent
from gateway.workers.epoch import Epoch
from gateway.workers.launchers.agent import AgentLauncher
from tandem.agent import process_identity
from tandem.agent.address import socket_path
from tandem.agent.launcher import ProcessLauncher
from tandem.agent.process_groups import FILE_NAME, ProcessGroups
from tandem.agent.service import AgentServicer, serving
from tandem.agent.worker_process import group_members
from tandem.errors import WorkerMayRun, WorkerStartFailed
from tandem.protocol.worker import WorkerSpec
from tandem.settings.sharing import Sharing
from tandem.v1 import agent_pb2
from tests.support.waiting import until, until_serving, wait_until

DUMMY = str(Path(__file__).parents[2] / "support" / "dummy_worker.py")
KILLED = "the trainer was killed by SIGKILL, as the kernel does when memory runs out"


def agent_of(data_dir: Path, behaviour: str = "serve"):
    launcher = ProcessLauncher(
        data_dir=data_dir, command=lambda _: [sys.executable, DUMMY, behaviour]
    )
    return serving(launcher, data_dir=data_dir)


@contextlib.contextmanager
def running(*command: str):
    """A process that leads its own group."""
    process = subprocess.Popen(
        command,
        start_new_session=True,
        env=os.environ | {"TANDEM_POOL_PROCESSES": "0"},
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def left_by_its_first(*, note: Callable[[int], None]):
    """A group without its own session, whose first process was told to `note` and has ended. Yields
    its number and its other process."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    command = ["sh", "-c", "sleep 600 & echo $!; read line"]
    with subprocess.Popen(command, process_group=0, **pipes) as first:
        member = int(first.stdout.readline())
        try:
            note(first.pid)
            first.stdin.close()
            first.wait(60)
            yield first.pid, member
        finally:
            os.kill(member, signal.SIGKILL)


@contextlib.asynccontextmanager
async def gateway_of(data_dir: Path):
    """A launcher that ends like a killed gateway's: its workers stay."""
    epoch = Epoch(number=1, superseded=lambda: None)
    launcher = AgentLauncher(data_dir=data_dir, timeout=120, epoch=epoch)
    try:
        yield launcher
    finally:
        await launcher.close()


def spec(worker_id: str = "trainer-s-1-0") -> WorkerSpec:
    return WorkerSpec(
        worker_id=worker_id,
        kind="trainer",
        secret="the secret of a worker",
        model_name="tiny",
        model_path="models/tiny",
        session_id="s-1",
        run_id="s-1:train:0",
    )


async def test_a_worker_outlives_its_gateway_and_the_next_one_has_all_that_it_needs(tmp_path):
    async with agent_of(tmp_path):
        async with gateway_of(tmp_path) as first:
            handle = await first.start(spec())
        async with gateway_of(tmp_path) as second:
            assert await second.list() == [handle]
            assert (handle.session_id, handle.run_id) == ("s-1", "s-1:train:0")
            await until_serving(handle)
            watch = second.watch()
            os.kill(handle.pid, signal.SIGKILL)
            exit_ = await asyncio.wait_for(anext(watch), 60)
        assert exit_.worker_id == handle.worker_id
        assert exit_.reason == KILLED


async def test_a_gateway_that_was_away_is_told_of_the_exits_meanwhile(tmp_path):
    async with agent_of(tmp_path):
        async with gateway_of(tmp_path) as first:
            handle = await first.start(spec())
        os.kill(handle.pid, signal.SIGKILL)
        async with gateway_of(tmp_path) as second:
            exit_ = await asyncio.wait_for(anext(second.watch()), 60)
            assert exit_.reason == KILLED
            assert await second.list() == []


async def test_a_worker_of_a_group_shared_by_mps_starts_only_beside_the_daemon(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path / "pipes"))
    asked = spec().model_copy(update={"sharing": Sharing.MPS, "group": "gpu"})
    async with agent_of(tmp_path), gateway_of(tmp_path) as gateway:
        with pytest.raises(
            WorkerStartFailed,
            match=r"group gpu is shared by mps, but no MPS daemon listens in .*"
            "pipes: start `nvidia-cuda-mps-control -d` as the agent's user",
        ):
            await gateway.start(asked)
        (tmp_path / "pipes").mkdir()
        (tmp_path / "pipes" / "control").touch()
        handle = await gateway.start(asked)
        await gateway.stop(handle.worker_id)


async def test_an_agent_forgets_the_gateways_that_watched_it(tmp_path):
    launcher = ProcessLauncher(data_dir=tmp_path)
    async with serving(launcher, data_dir=tmp_path):
        for _ in range(3):
            async with gateway_of(tmp_path) as gateway:
                gateway.watch()
                await until(lambda: launcher._watchers, what="it watches")
            await until(lambda: not launcher._watchers, what="it watches no more")


async def test_a_gateway_that_dies_while_a_worker_starts_leaves_nothing_of_it(tmp_path):
    launcher = ProcessLauncher(
        data_dir=tmp_path, command=lambda _: [sys.executable, DUMMY, "silent"]
    )
    async with serving(launcher, data_dir=tmp_path), gateway_of(tmp_path) as first:
        starting = asyncio.create_task(first.start(spec()))
        (worker,) = await until(lambda: tuple(launcher._workers.values()))
        await first._channel.close()
        with contextlib.suppress(asyncio.CancelledError, WorkerStartFailed):
            await starting
        await asyncio.wait_for(worker.ended, 60)
        assert group_members(worker.pid) == []


async def test_a_worker_that_a_gateway_had_stopped_when_it_died_ends_and_is_left_to_nobody(
    tmp_path,
):
    """It ignores SIGTERM, so that it is killed later."""
    launcher = ProcessLauncher(data_dir=tmp_path, command=lambda _: [sys.executable, DUMMY, "deaf"])
    async with serving(launcher, data_dir=tmp_path), gateway_of(tmp_path) as second:
        async with gateway_of(tmp_path) as first:
            handle = await first.start(spec().model_copy(update={"stop_timeout": 1.0}))
            (worker,) = launcher._workers.values()
            stopping = asyncio.create_task(first.stop(handle.worker_id))
            await until(lambda: worker.expected)
            assert not worker.ended.done()
            stopping.cancel()
        assert await second.list() == []
        await asyncio.wait_for(worker.ended, 60)
        assert group_members(worker.pid) == []


async def test_a_gateway_learns_that_its_workers_ended_with_the_agent_and_uses_the_next(tmp_path):
    async with gateway_of(tmp_path) as launcher:
        async with agent_of(tmp_path):
            handle = await launcher.start(spec())
            watch = launcher.watch()
            await until_serving(handle)
            await until(lambda: launcher.reports)
        exit_ = await asyncio.wait_for(anext(watch), 60)
        assert exit_.worker_id == handle.worker_id
        assert exit_.reason == "the trainer ended with the agent that had started it"
        async with agent_of(tmp_path):
            again = await launcher.start(spec())
            assert await launcher.list() == [again]
            os.kill(again.pid, signal.SIGKILL)
            assert (await asyncio.wait_for(anext(watch), 60)).reason == KILLED
            await launcher.stop(again.worker_id)


async def test_a_worker_whose_agent_was_replaced_unnoticed_is_told_to_have_ended(tmp_path):
    async with gateway_of(tmp_path) as launcher:
        async with agent_of(tmp_path):
            handle = await launcher.start(spec())
        async with agent_of(tmp_path):
            watch = launcher.watch()
            exit_ = await asyncio.wait_for(anext(watch), 60)
    assert exit_.reason == "the trainer ended with the agent that had started it"
    assert exit_.worker_id == handle.worker_id


async def test_an_end_that_comes_before_the_watch_is_told_once_and_with_its_reason(tmp_path):
    agent = ProcessLauncher(data_dir=tmp_path, command=lambda _: [sys.executable, DUMMY, "serve"])
    async with serving(agent, data_dir=tmp_path), gateway_of(tmp_path) as launcher:
        first, second = spec(), spec().model_copy(update={"worker_id": "trainer-s-0123456789ab-1"})
        first, second = [await launcher.start(each) for each in (first, second)]
        await asyncio.gather(until_serving(first), until_serving(second))
        os.kill(first.pid, signal.SIGKILL)
        await until(lambda: agent.ids() == (second.worker_id,))
        watch = launcher.watch()
        exit_ = await asyncio.wait_for(anext(watch), 60)
        assert exit_.worker_id == first.worker_id and exit_.reason == KILLED
        os.kill(second.pid, signal.SIGKILL)
        exit_ = await asyncio.wait_for(anext(watch), 60)
        assert exit_.worker_id == second.worker_id and exit_.reason == KILLED


async def test_a_gateway_without_an_agent_says_how_to_start_one(tmp_path, monkeypatch):
    monkeypatch.setattr(gateway.workers.launchers.agent, "_CONNECT_SECONDS", 0.2)
    async with gateway_of(tmp_path) as launcher:
        with pytest.raises(WorkerStartFailed, match="start one with `tandem agent`"):
            await launcher.list()


async def test_the_end_of_a_worker_is_known_when_the_next_agent_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(gateway.workers.launchers.agent, "_CONNECT_SECONDS", 1.0)
    async with gateway_of(tmp_path) as launcher:
        async with agent_of(tmp_path):
            handle = await launcher.start(spec())
        with pytest.raises(WorkerMayRun, match="no agent answers"):
            await launcher.stop(handle.worker_id)
        async with agent_of(tmp_path):
            await asyncio.wait_for(launcher.stop(handle.worker_id), 60)


async def test_an_agent_that_is_frozen_says_nothing_of_a_worker_that_was_to_end(tmp_path):
    with running(sys.executable, "-m", "tandem.agent", "--data-dir", str(tmp_path)) as agent:
        async with gateway_of(tmp_path) as launcher:
            await launcher.list()
            agent.send_signal(signal.SIGSTOP)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(launcher.stop("w"), 0.5)
            agent.send_signal(signal.SIGCONT)
            await launcher.stop("w")


async def test_a_gateway_notices_that_an_agent_is_frozen_and_that_it_goes_on(tmp_path, monkeypatch):
    options = dict(gateway.workers.launchers.agent._OPTIONS)
    options |= {"grpc.keepalive_time_ms": 500, "grpc.http2.ping_timeout_ms": 1000}
    monkeypatch.setattr(gateway.workers.launchers.agent, "_OPTIONS", list(options.items()))
    with running(sys.executable, "-m", "tandem.agent", "--data-dir", str(tmp_path)) as agent:
        async with gateway_of(tmp_path) as launcher:
            launcher.watch()
            await until(lambda: launcher.reports)
            await asyncio.sleep(2.5)  # several pings without a call or an end of a worker
            agent.send_signal(signal.SIGSTOP)
            await until(lambda: not launcher.reports, timeout=20)
            agent.send_signal(signal.SIGCONT)
            await until(lambda: launcher.reports)
            assert await launcher.list() == []


async def test_an_agent_serves_when_nothing_is_left_of_the_workers_of_the_one_before(tmp_path):
    """A process that ignores its lifeline acts as one that dies slowly."""
    with running("sleep", "600") as survivor:
        ProcessGroups(tmp_path / FILE_NAME).record_group(survivor.pid)
        async with agent_of(tmp_path), gateway_of(tmp_path) as launcher:
            await launcher.stop("of-the-agent-before")
            assert group_members(survivor.pid) == []


async def test_an_agent_notes_its_workers_while_they_run_and_leaves_other_processes_alone(tmp_path):
    file = tmp_path / FILE_NAME
    with running("sleep", "600") as other:
        torn = "\0" * 79
        file.write_text(f"{other.pid} since another time\n{torn}\n12\n")
        async with agent_of(tmp_path), gateway_of(tmp_path) as launcher:
            assert group_members(other.pid), "it was started later, and has the number by chance"
            handle = await launcher.start(spec())
            assert str(handle.pid) in file.read_text().split()
            await launcher.stop(handle.worker_id)
            await until(lambda: not file.read_text().strip(), what="it is noted no more")


async def test_an_agent_leaves_a_later_group_alone_that_has_the_number_and_is_no_session(tmp_path):
    groups = ProcessGroups(tmp_path / FILE_NAME)
    with left_by_its_first(note=groups.record_group) as (pgid, member):
        assert group_members(pgid) == [member]
        await ProcessGroups(tmp_path / FILE_NAME).end_earlier()
        assert group_members(pgid) == [member]


async def test_an_agent_leaves_processes_alone_whose_number_was_noted_in_another_container(
    tmp_path, monkeypatch
):
    with running("sleep", "600") as other:
        with monkeypatch.context() as elsewhere:
            elsewhere.setattr(process_identity, "namespace", lambda: "another ")
            ProcessGroups(tmp_path / FILE_NAME).record_group(other.pid)
        await ProcessGroups(tmp_path / FILE_NAME).end_earlier()
        assert group_members(other.pid)


async def test_an_agent_that_cannot_note_its_workers_says_in_which_file(tmp_path, monkeypatch):
    file = tmp_path / FILE_NAME
    full = os.fdopen(os.open("/dev/full", os.O_RDWR), "r+b")
    monkeypatch.setattr(Path, "open", lambda _path, _mode: full)
    with pytest.raises(OSError, match="No space left") as raised:
        await ProcessGroups(file).end_earlier()
    assert raised.value.filename == str(file)


async def test_a_worker_that_was_stopped_does_not_start_by_a_request_that_comes_late(tmp_path):
    async with agent_of(tmp_path), gateway_of(tmp_path) as launcher:
        await launcher.stop(spec().worker_id)
        with pytest.raises(WorkerStartFailed, match="was stopped before it started"):
            await launcher.start(spec())


async def test_what_an_earlier_gateway_was_about_to_start_is_ended_before_the_next_one_knows(
    tmp_path,
):
    launcher = ProcessLauncher(
        data_dir=tmp_path, command=lambda _: [sys.executable, DUMMY, "silent"]
    )
    async with serving(launcher, data_dir=tmp_path), gateway_of(tmp_path) as first:
        starting = asyncio.create_task(first.start(spec()))
        (worker,) = await until(lambda: tuple(launcher._workers.values()))
        async with gateway_of(tmp_path) as second:
            assert await second.list() == []
            assert group_members(worker.pid) == []
        with pytest.raises(WorkerStartFailed):
            await starting


async def test_only_its_user_may_open_the_socket_and_its_path_may_have_any_name(tmp_path):
    for data_dir in (tmp_path / "short", tmp_path / ("long" * 30), tmp_path / "a,b 50%41#?é;"):
        data_dir.mkdir()
        async with agent_of(data_dir), gateway_of(data_dir) as launcher:
            assert stat.S_IMODE(socket_path(data_dir).stat().st_mode) == 0o600
            assert await launcher.list() == []
        assert not socket_path(data_dir).exists()


async def test_an_agent_says_what_it_has(tmp_path):
    servicer = AgentServicer(ProcessLauncher(data_dir=tmp_path))
    found = await servicer.Describe(agent_pb2.DescribeAgentRequest(), None)
    assert list(found.kinds) == ["trainer", "sampler"]
    assert found.cores and found.memory_bytes > 2**20


def test_an_agent_that_is_started_by_itself_has_the_listed_variables_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("GITHUB_PAT", "a secret of another program")
    tandem = str(Path(sys.executable).with_name("tandem"))
    with running(tandem, "agent", "--data-dir", str(tmp_path)) as process:
        folder = Path(f"/proc/{process.pid}")
        wait_until(lambda: b"tandem.agent" in (folder / "cmdline").read_bytes())
        environment = (folder / "environ").read_bytes()
    assert b"PATH=" in environment
    assert b"a secret" not in environment
