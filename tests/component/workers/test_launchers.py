"""All launchers: `ProcessLauncher`, and `AgentLauncher` through an agent's socket."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from gateway.workers.epoch import Epoch
from gateway.workers.launchers import Launcher, make_launchers
from gateway.workers.launchers.agent import AgentLauncher
from tandem.agent.launcher import ProcessLauncher
from tandem.agent.pool import default_command
from tandem.agent.service import serving
from tandem.agent.worker_process import WorkerProcess, group_members
from tandem.errors import InvalidRequest, WorkerCrashed, WorkerStartFailed
from tandem.protocol.worker import WorkerExit, WorkerSpec
from tandem.protocol.worker_health import wait_until_serving
from tandem.settings.gateway import GatewaySettings
from tests.support.waiting import until, until_serving

DUMMY = str(Path(__file__).parents[2] / "support" / "dummy_worker.py")
KILLED = "the trainer was killed by SIGKILL, as the kernel does when memory runs out"
SECRET = "the-secret-of-this-worker"
EPOCH = Epoch(number=1, superseded=lambda: None)


@pytest.fixture(params=["process", "agent"])
async def make(tmp_path, request):
    """A launcher of the dummy worker with a behaviour, or of another command."""
    async with contextlib.AsyncExitStack() as opened:

        async def launcher(behaviour: str, command: list[str] | None = None) -> Launcher:
            command = command or [sys.executable, DUMMY, behaviour]
            processes = ProcessLauncher(data_dir=tmp_path, command=lambda _: command)
            opened.push_async_callback(processes.close)
            if request.param == "process":
                return processes
            await opened.enter_async_context(serving(processes, data_dir=tmp_path))
            agent = AgentLauncher(data_dir=tmp_path, timeout=120, epoch=EPOCH)
            opened.push_async_callback(agent.close)
            agent.processes = processes
            return agent

        yield launcher


def processes_of(launcher: Launcher) -> dict[str, WorkerProcess]:
    return getattr(launcher, "processes", launcher)._workers


def spec(worker_id: str = "trainer-s-1-0", *, start: float = 60, stop: float = 60) -> WorkerSpec:
    return WorkerSpec(
        worker_id=worker_id,
        kind="trainer",
        secret=SECRET,
        model_name="tiny",
        model_path="models/tiny",
        session_id="s-1",
        run_id="s-1:train:0",
        start_timeout=start,
        stop_timeout=stop,
    )


def descriptors(pid: str) -> dict[str, str]:
    """Open file descriptors and their targets (on Linux), without connections of earlier tests and
    the agent's watched folder."""
    found = {}
    folder = Path("/proc") / pid / "fd"
    for entry in sorted(folder.iterdir()) if folder.exists() else ():
        with contextlib.suppress(FileNotFoundError):  # the folder's own descriptor
            found[entry.name] = str(entry.readlink())
    return {
        name: what
        for name, what in found.items()
        if not what.startswith("socket:") and what != "/dev/shm"
    }


def text_of(path: str) -> str:
    return Path(path).read_text()


async def next_end(watch) -> WorkerExit:
    return await asyncio.wait_for(anext(watch), 60)


async def test_a_started_worker_has_reported_its_address_and_becomes_ready(make, tmp_path):
    launcher = await make("serve")
    handle = await launcher.start(spec())
    pid = handle.pid
    assert await launcher.list() == [handle]
    assert handle.kind == "trainer"
    assert handle.metrics_port > 0
    assert Path(handle.log_path) == tmp_path / "logs" / "trainer-s-1-0.log"
    assert SECRET not in repr(handle)
    assert os.getpgid(pid) == pid == os.getsid(pid)
    await until_serving(handle)


def niceness_of(pid: int) -> set[int]:
    """Niceness of a process and, where the kernel groups by session, of its session."""
    found = {os.getpriority(os.PRIO_PROCESS, pid)}
    autogroup = Path(f"/proc/{pid}/autogroup")
    return found | ({int(autogroup.read_text().split()[-1])} if autogroup.exists() else set())


async def test_a_worker_leaves_the_processors_to_the_gateway(make):
    launcher = await make("serve")
    await launcher.start(spec())
    pid = processes_of(launcher)["trainer-s-1-0"].pid
    assert niceness_of(pid) == {min(19, os.getpriority(os.PRIO_PROCESS, 0) + 5)}


async def test_stopping_leaves_no_process_and_tells_no_watcher(make):
    launcher = await make("family")
    watch = launcher.watch()
    handle = await launcher.start(spec())
    pid = handle.pid
    assert len(group_members(pid)) == 2
    await launcher.stop(handle.worker_id)
    assert group_members(pid) == []
    assert await launcher.list() == []
    await launcher.stop(handle.worker_id)
    await launcher.stop("never-heard-of")
    await launcher.close()
    assert [end async for end in watch] == []


async def test_a_worker_may_end_in_its_own_way_when_asked_to_stop(make):
    launcher = await make("polite")
    handle = await launcher.start(spec())
    await launcher.stop(handle.worker_id)
    about, said = text_of(handle.log_path).splitlines()
    assert json.loads(about)["run_id"] == "s-1:train:0"
    assert SECRET not in about
    assert said == "goodbye"


async def test_a_worker_that_does_not_listen_is_killed(make):
    launcher = await make("deaf")
    handle = await launcher.start(spec(stop=0.2))
    pid = handle.pid
    await launcher.stop(handle.worker_id)
    assert group_members(pid) == []


async def test_a_worker_that_is_frozen_can_be_killed_without_being_asked(make):
    launcher = await make("family")
    handle = await launcher.start(spec(stop=10_000))
    pid = handle.pid
    os.killpg(pid, signal.SIGSTOP)
    await asyncio.wait_for(launcher.stop(handle.worker_id, at_once=True), 60)
    assert group_members(pid) == []


async def test_an_unexpected_end_is_told_to_every_watcher_and_takes_the_children_along(make):
    launcher = await make("family")
    watches = [launcher.watch(), launcher.watch()]
    handle = await launcher.start(spec())
    pid = handle.pid
    os.kill(pid, signal.SIGKILL)
    for watch in watches:
        assert await next_end(watch) == WorkerExit(worker_id=handle.worker_id, reason=KILLED)
    assert group_members(pid) == []
    assert await launcher.list() == []


async def test_the_same_worker_id_can_be_started_again_after_its_end(make):
    launcher = await make("polite")
    watch = launcher.watch()
    first = await launcher.start(spec())
    pid = first.pid
    with pytest.raises(WorkerStartFailed, match="runs already"):
        await launcher.start(spec())
    os.kill(pid, signal.SIGKILL)
    await next_end(watch)
    second = await launcher.start(spec())
    assert await launcher.list() == [second]


@pytest.mark.parametrize("behaviour", ["complain-on-signal", "complain-and-stay-on-signal"])
async def test_what_a_worker_says_last_is_the_reason_of_its_end(make, behaviour):
    launcher = await make(behaviour)
    watch = launcher.watch()
    handle = await launcher.start(spec(stop=0.2))
    pid = handle.pid
    os.kill(pid, signal.SIGUSR1)
    assert (await next_end(watch)).reason == "rank 1 was killed by SIGKILL"
    assert group_members(pid) == []


@pytest.mark.parametrize("behaviour", ["refuse", "refuse-and-stay"])
async def test_a_worker_that_cannot_start_gives_its_own_reason(make, behaviour):
    launcher = await make(behaviour)
    watch = launcher.watch()
    with pytest.raises(WorkerStartFailed, match="did not start: rank 1 was killed by SIGKILL"):
        await launcher.start(spec())
    assert await launcher.list() == []
    await launcher.close()
    assert [end async for end in watch] == []  # the caller of start knows it


async def test_a_crash_at_the_start_is_explained_by_the_log_without_the_secret(make, tmp_path):
    launcher = await make("crash")
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "trainer-s-1-0.log").write_text("a line of an earlier life\n")
    with pytest.raises(WorkerStartFailed) as caught:
        await launcher.start(spec())
    assert "exited with status 3" in caught.value.message
    assert "OSError: no such model" in caught.value.message
    assert str(Path(__file__).parents[2]) not in caught.value.message
    assert "earlier life" not in caught.value.message
    assert SECRET not in caught.value.message


async def test_a_fault_in_native_code_is_told_apart_from_a_refusal(make):
    with pytest.raises(WorkerCrashed, match="killed by SIGSEGV"):
        await (await make("fault")).start(spec())


async def test_a_worker_that_never_reports_is_killed_and_its_log_named(make, tmp_path):
    launcher = await make("silent")
    with pytest.raises(WorkerStartFailed, match=r"within 1 s; its log is trainer-s-1-0\.log"):
        await launcher.start(spec(start=1))
    assert await launcher.list() == []


async def test_a_fault_in_native_code_of_a_loading_worker_is_told_as_one(make):
    launcher = await make("never-ready")
    watch = launcher.watch()
    handle = await launcher.start(spec())
    os.kill(handle.pid, signal.SIGSEGV)
    assert (await next_end(watch)).crashed


async def test_a_wrong_secret_is_refused_at_once(make):
    launcher = await make("serve")
    handle = await launcher.start(spec("a"))
    answer = await wait_until_serving(replace(handle, secret="another"), timeout=3600)
    assert answer.startswith("its health service answered UNAUTHENTICATED")
    assert await wait_until_serving(handle, timeout=60) == ""


async def test_garbage_on_the_report_descriptor_is_passed_over(make):
    launcher = await make("garbage")
    handle = await launcher.start(spec())
    assert (handle.address, handle.metrics_port) == ("127.0.0.1:1", 2)


async def test_a_cancelled_start_leaves_nothing(make, tmp_path):
    launcher = await make("silent")
    starting = asyncio.create_task(launcher.start(spec()))
    (worker,) = await until(lambda: tuple(processes_of(launcher).values()))
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    await launcher.stop(worker.spec.worker_id)  # waits for the end
    assert group_members(worker.pid) == []


async def test_stopping_and_closing_end_a_start_in_flight(make):
    launcher = await make("silent")
    starting = [asyncio.create_task(launcher.start(spec(f"w{i}"))) for i in range(3)]
    await until(lambda: "w0" in processes_of(launcher))
    await launcher.stop("w0")
    await launcher.close()
    for each in starting:
        with pytest.raises(WorkerStartFailed):
            await each
    with pytest.raises(WorkerStartFailed, match="closed"):
        await launcher.start(spec("w4"))


async def test_a_program_that_does_not_exist_and_a_log_that_cannot_be_opened_are_told(
    make, tmp_path
):
    launcher = await make("", ["/no/such/program"])
    await launcher.list()  # connects
    before = descriptors("self")
    with pytest.raises(WorkerStartFailed, match="No such file or directory: 'program'"):
        await launcher.start(spec())
    (tmp_path / "logs" / "w.log").mkdir()
    with pytest.raises(WorkerStartFailed, match=r"'w\.log'"):
        await launcher.start(spec("w"))
    assert descriptors("self") == before


async def test_a_full_disk_for_the_log_does_not_hide_why_a_worker_ended(make, tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "w.log").symlink_to("/dev/full")
    launcher = await make("refuse")
    with pytest.raises(WorkerStartFailed, match="rank 1"):
        await launcher.start(spec("w"))


async def test_the_secret_is_in_no_argument_and_our_key_in_no_environment(make, monkeypatch):
    monkeypatch.setenv("TANDEM_API_KEY", "tml-key")
    monkeypatch.setenv("TINKER_API_KEY", "tml-key")
    monkeypatch.setenv("SOMETHING_ELSE", "1")
    monkeypatch.setenv("TANDEM_BACKEND_ELSE", "1")
    launcher = await make("environment")
    handle = await launcher.start(spec())
    text = text_of(handle.log_path)
    assert "'TANDEM_BACKEND_ELSE'" in text
    assert "'SOMETHING_ELSE'" not in text
    assert "TANDEM_API_KEY" not in text
    assert "TINKER_API_KEY" not in text
    assert SECRET not in text
    assert "PYTHONUNBUFFERED" in text


async def test_no_worker_inherits_the_lifeline_or_the_report_of_another(make):
    launcher = await make("polite")
    pipes = []
    for i in range(3):
        handle = await launcher.start(spec(f"w{i}"))
        pid = handle.pid
        links = descriptors(str(pid)).values()
        pipes.append({link for link in links if link.startswith("pipe:")})
    assert [len(each) for each in pipes] == [2, 2, 2]  # one lifeline and one report
    assert len(set.union(*pipes)) == 6


async def test_a_specification_longer_than_a_pipe_is_refused(make):
    launcher = await make("serve")
    long = spec().model_copy(update={"model_path": "x" * 100_000})
    with pytest.raises(WorkerStartFailed, match="bytes"):
        await launcher.start(long)


async def test_the_default_command_runs_the_service_of_its_kind():
    assert default_command("trainer") == [sys.executable, "-m", "trainer_service"]
    assert default_command("sampler") == [sys.executable, "-m", "sampler_service"]


async def test_the_settings_name_the_launcher(monkeypatch, tmp_path):
    launchers = make_launchers(GatewaySettings(data_dir=tmp_path), EPOCH)
    assert isinstance(launchers["trainer"], AgentLauncher)
    assert launchers["trainer"] is launchers["sampler"]
    monkeypatch.setenv("TANDEM_LAUNCHER", "slurm")
    with pytest.raises(
        InvalidRequest, match=r"unknown TANDEM_LAUNCHER 'slurm'.* agent, kubernetes"
    ):
        make_launchers(GatewaySettings(data_dir=tmp_path), EPOCH)
