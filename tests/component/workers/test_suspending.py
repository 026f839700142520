"""An agent suspends all or none of a worker's processes."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

import tandem.agent.launcher
from gateway.workers.epoch import Epoch
from gateway.workers.launchers.agent import AgentLauncher
from tandem.agent.launcher import ProcessLauncher
from tandem.agent.service import serving
from tandem.agent.suspender import CudaCheckpoint, uses_gpu
from tandem.agent.worker_process import group_members
from tandem.errors import CannotSleep, IllegalTransition, SuspendFailed
from tandem.protocol.worker import WorkerSpec
from tests.support.cuda_checkpoint import Machine
from tests.support.waiting import until

DUMMY = str(Path(__file__).parents[2] / "support" / "dummy_worker.py")


@pytest.fixture
def machine(tmp_path) -> Machine:
    made = Machine(tmp_path / "machine")
    made.add(7, 8)
    return made


# --- The program -----------------------------------------------------------------------------


async def test_all_processes_are_locked_before_the_first_is_moved_and_all_go_on_afterwards(machine):
    await machine.suspender.suspend([7, 8], timeout=60)
    assert machine.states(7, 8) == ["checkpointed"] * 2
    actions = [call.split()[1] for call in machine.calls() if "--action" in call]
    assert actions == ["lock", "lock", "checkpoint", "checkpoint"]
    assert "--action lock --timeout 60000 --pid 7" in machine.calls()
    await machine.suspender.suspend([7, 8], timeout=60)
    await machine.suspender.resume([7, 8], timeout=60)
    assert machine.states(7, 8) == ["running"] * 2
    await machine.suspender.resume([7, 8], timeout=60)
    back = [call for call in machine.calls() if "--action" in call][4:]
    for pid in ("7", "8"):  # each on its own
        own = [call.split()[1] for call in back if call.endswith(f"--pid {pid}")]
        assert own == ["restore", "unlock"]
    assert len(back) == 4


@pytest.mark.parametrize("action", ["lock", "checkpoint"])
async def test_if_one_process_cannot_be_moved_the_others_go_on(machine, action):
    machine.on(f"fail {action} 8")
    with pytest.raises(SuspendFailed, match=r"process 8 failed: not supported; and it does not go"):
        await machine.suspender.suspend([7, 8], timeout=60)
    assert machine.states(7, 8) == ["running", "failed"]


async def test_what_the_program_says_it_did_is_checked(machine):
    machine.on("deaf checkpoint 7")
    with pytest.raises(SuspendFailed, match=r"process 7 is locked after .*; all processes go on"):
        await machine.suspender.suspend([7, 8], timeout=60)
    assert machine.states(7, 8) == ["running"] * 2


async def test_a_program_that_does_not_end_is_killed_and_all_go_on(machine):
    machine.on("hang checkpoint 8")
    with pytest.raises(SuspendFailed, match=r"longer than 2 s; all processes go on"):
        await machine.suspender.suspend([7, 8], timeout=2)
    assert machine.states(7, 8) == ["running"] * 2


async def test_a_resume_that_fails_says_so(machine):
    await machine.suspender.suspend([7, 8], timeout=60)
    machine.on("fail restore 7")
    with pytest.raises(SuspendFailed, match="restore of process 7 failed"):
        await machine.suspender.resume([7, 8], timeout=60)
    machine.on("hang restore 7")
    (machine.folder / "fail restore 7").unlink()
    (machine.folder / "7").write_text("checkpointed")
    with pytest.raises(SuspendFailed, match=r"resuming the worker took longer than 2 s"):
        await machine.suspender.resume([7, 8], timeout=2)


@pytest.mark.parametrize(
    ("opened", "expected"),
    [
        (["/dev/null", "/dev/nvidiactl"], False),
        (["/dev/null", "/dev/nvidia0"], True),
        (["/dev/nvidia-uvm"], True),
        ([], False),
    ],
)
def test_a_process_uses_a_gpu_that_has_its_device_open(tmp_path, opened, expected):
    folder = tmp_path / "7" / "fd"
    folder.mkdir(parents=True)
    for number, device in enumerate(opened):
        (folder / str(number)).symlink_to(device)
    assert uses_gpu(7, proc=tmp_path) == expected
    assert not uses_gpu(8, proc=tmp_path)


def test_where_it_cannot_be_used_it_says_why():
    def of(driver: str, program: str | None) -> str:
        return CudaCheckpoint(find_program=lambda _: program, driver=lambda: driver).why_not()

    assert of("580.95.05", "/usr/bin/cuda-checkpoint") == ""
    assert of("580.95.05", None) == "cuda-checkpoint is not installed"
    assert "570 or a newer one" in of("550.54.14", "/usr/bin/cuda-checkpoint")
    assert "this host has none" in of("", "/usr/bin/cuda-checkpoint")


# --- Through the agent -----------------------------------------------------------------------


@pytest.fixture
async def agent(machine, tmp_path, monkeypatch):
    """A gateway's launcher, and an agent that starts dummies."""
    monkeypatch.setattr(
        tandem.agent.launcher, "uses_gpu", lambda pid: (machine.folder / str(pid)).exists()
    )
    launcher = ProcessLauncher(
        data_dir=tmp_path,
        command=lambda _: [sys.executable, DUMMY, "serve"],
        suspender=machine.suspender,
    )
    epoch = Epoch(number=1, superseded=lambda: None)
    gateway = AgentLauncher(data_dir=tmp_path, timeout=60, epoch=epoch)
    async with serving(launcher, data_dir=tmp_path):
        yield gateway
        await gateway.close()


async def started(
    agent: AgentLauncher | ProcessLauncher, machine: Machine, *, kind: str = "trainer"
) -> tuple[str, int]:
    spec = WorkerSpec(
        worker_id=f"{kind}-s-1-0",
        kind=kind,
        secret="the secret of a worker",
        model_name="tiny",
        model_path="models/tiny",
        session_id="s-1",
        lease=1,
    )
    handle = await agent.start(spec)
    pid = handle.pid
    machine.add(pid)
    return handle.worker_id, pid


async def test_a_late_call_with_an_older_lease_changes_nothing(agent, machine):
    worker, pid = await started(agent, machine)
    await agent.suspend(worker, lease=2, timeout=60)
    assert machine.states(pid) == ["checkpointed"]
    await agent.resume(worker, lease=3, timeout=60)
    assert machine.states(pid) == ["running"]
    await agent.suspend(worker, lease=4, timeout=60)
    with pytest.raises(IllegalTransition, match="the lease 3 came after 4"):
        await agent.resume(worker, lease=3, timeout=60)
    assert machine.states(pid) == ["checkpointed"]


async def test_what_a_gateway_began_that_has_gone_is_ended_before_the_next_one_s_call(
    agent, machine
):
    worker, pid = await started(agent, machine)
    hanging = machine.on(f"hang checkpoint {pid}")
    asked = asyncio.create_task(agent.suspend(worker, lease=2, timeout=3))
    lock: Callable[[], bool] = lambda: machine.states(pid) == ["locked"]  # noqa: E731
    await until(lock, what="it is being suspended")
    asked.cancel()
    hanging.unlink()
    await agent.resume(worker, lease=3, timeout=60)
    assert machine.states(pid) == ["running"]


async def test_a_suspended_worker_can_be_killed(agent, machine):
    worker, _ = await started(agent, machine)
    await agent.suspend(worker, lease=2, timeout=60)
    await agent.stop(worker, at_once=True)
    assert await agent.list() == []
    with pytest.raises(SuspendFailed, match="does not run"):
        await agent.resume(worker, lease=3, timeout=60)


@pytest.mark.parametrize(("kind", "error"), [("trainer", SuspendFailed), ("job", CannotSleep)])
async def test_a_worker_without_a_gpu_cannot_be_suspended(agent, machine, kind, error):
    worker, pid = await started(agent, machine, kind=kind)
    (machine.folder / str(pid)).unlink()
    with pytest.raises(error, match=f"no process of the {kind} uses a GPU"):
        await agent.suspend(worker, lease=2, timeout=60)


async def test_an_agent_says_whether_it_can_suspend(agent, machine):
    assert (await agent.describe_host()).no_suspender == ""
    machine.program.unlink()
    assert (await agent.describe_host()).no_suspender == "cuda-checkpoint is not installed"


async def test_an_agent_that_ends_ends_a_hanging_suspend_with_its_program(
    machine, tmp_path, monkeypatch
):
    monkeypatch.setattr(tandem.agent.launcher, "uses_gpu", lambda _: True)
    launcher = ProcessLauncher(
        data_dir=tmp_path,
        command=lambda _: [sys.executable, DUMMY, "serve"],
        suspender=machine.suspender,
    )
    worker, pid = await started(launcher, machine)
    machine.on(f"hang checkpoint {pid}")
    asked = asyncio.create_task(launcher.suspend(worker, lease=2, timeout=600))
    await until(lambda: bool(hanging_programs()), what="the program hangs")
    async with asyncio.timeout(60):
        await launcher.close()
    assert group_members(pid) == []
    assert hanging_programs() == []
    await asyncio.wait({asked}, timeout=60)
    assert asked.cancelled()


def hanging_programs() -> list[dict[str, object]]:
    children = psutil.process_iter(["ppid", "cmdline"])  # without error for an ended child
    of_this = [child.info for child in children if child.info["ppid"] == os.getpid()]
    return [info for info in of_this if info["cmdline"] == ["sleep", "600"]]
