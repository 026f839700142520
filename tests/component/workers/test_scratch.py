"""A worker's temporary folder and names in /dev/shm end with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.agent.launcher import ProcessLauncher
from tandem.agent.scratch import ScratchFolders
from tandem.agent.service import serving
from tests.component.workers.test_launchers import processes_of, spec
from tests.support.files import entries
from tests.support.waiting import until

SHARED = Path("/dev/shm")
pytestmark = pytest.mark.skipif(not SHARED.is_dir(), reason="Linux's own")

_WRITES = """
import os, sys, tempfile, time
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path
from tandem.protocol.worker import WorkerReport
from tandem.protocol.worker_link import launcher_link
link = launcher_link(sys.argv[1:])
link.preload(lambda: None)
spec = link.read_spec()
link.hold_lifeline()
segment = shared_memory.SharedMemory(create=True, size=64)
resource_tracker.unregister(segment._name, "shared_memory")
Path(f"/dev/shm/__KMP_REGISTERED_LIB_{os.getpid()}_{os.getuid()}").write_text("openmp")
Path(tempfile.gettempdir(), "left").write_text(segment.name)
link.report(WorkerReport(address="127.0.0.1:1", metrics_port=2))
while True:
    time.sleep(0.1)
"""


def launcher_for(tmp_path) -> ProcessLauncher:
    return ProcessLauncher(data_dir=tmp_path, command=lambda _: [sys.executable, "-c", _WRITES])


async def started(launcher: ProcessLauncher) -> tuple[int, Path, set[str]]:
    """A worker's process, temporary folder and names in /dev/shm."""
    await launcher.start(spec())
    worker = processes_of(launcher)["trainer-s-1-0"]
    names = {
        (worker.scratch / "left").read_text(),
        f"__KMP_REGISTERED_LIB_{worker.pid}_{os.getuid()}",
    }
    await until(lambda: names <= set(entry_names(worker.scratch / ".shared-memory")))
    return worker.pid, worker.scratch, names


def entry_names(folder: Path) -> list[str]:
    return [entry.name for entry in entries(folder)]


@pytest.mark.parametrize("way", ["stopped", "killed"])
async def test_what_a_worker_has_written_goes_when_it_ends(tmp_path, way):
    launcher = launcher_for(tmp_path)
    foreign = SHARED / f"torch_{os.getpid()}_7_7"
    foreign.write_text("of a process that is no worker")
    try:
        pid, folder, names = await started(launcher)
        if way == "stopped":
            await launcher.stop("trainer-s-1-0", at_once=True)
        else:
            os.killpg(pid, signal.SIGKILL)
        await until(lambda: not folder.exists())
        assert not names & set(entry_names(SHARED))
        assert foreign.exists()
    finally:
        foreign.unlink()
        await launcher.close()
    assert not folder.parent.exists(), "the agent's own folder goes, too"


async def test_the_next_agent_removes_what_a_killed_one_has_left(tmp_path):
    launcher = launcher_for(tmp_path)
    _, folder, names = await started(launcher)
    launcher.scratches.remove = lambda _: None  # as if the agent were killed
    await launcher.close()
    assert folder.exists()
    assert names <= set(entry_names(SHARED))
    async with serving(launcher_for(tmp_path), data_dir=tmp_path):
        assert not folder.exists()
        assert not names & set(entry_names(SHARED))


async def test_an_idle_process_has_a_folder_of_its_own_and_its_worker_keeps_it(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("tandem.agent.pool._LEAST_FREE_BYTES", 0)
    launcher = ProcessLauncher(
        data_dir=tmp_path,
        command=lambda _: [sys.executable, "-c", _WRITES],
        pool={"trainer": 1},
    )
    try:
        await until(lambda: launcher.idle.pids("trainer"))
        (child,) = launcher.idle.children()
        await launcher.start(spec())
        worker = processes_of(launcher)["trainer-s-1-0"]
        assert (worker.pid, worker.scratch) == (child.pid, child.scratch)
        assert (child.scratch / "left").exists()
    finally:
        await launcher.close()
    assert not child.scratch.exists()


def test_what_still_runs_keeps_its_names_until_it_has_ended(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (shared := tmp_path / "shared").mkdir()
    scratches = ScratchFolders(tmp_path / "data", shared_memory=shared)
    folder = scratches.make()
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as process:
        try:
            scratches.note_pid(folder, process.pid)
            name = shared / f"__KMP_REGISTERED_LIB_{process.pid}_0"
            name.write_text("openmp")
            scratches.remove_all()
            assert folder.is_dir(), "its names would be nobody's"
        finally:
            process.kill()
    scratches.remove_all()
    assert not folder.exists()
    assert not name.exists()


def test_a_name_that_another_process_has_made_meanwhile_stays(tmp_path):
    shared = tmp_path / "shm"
    shared.mkdir()
    scratches = ScratchFolders(tmp_path, shared_memory=shared)
    folder = scratches.make()
    name = f"__KMP_REGISTERED_LIB_{os.getpid()}_0"
    (shared / name).write_text("ours")
    scratches.look([(os.getpgid(0), folder)])
    assert entry_names(folder / ".shared-memory") == [name]
    (shared / "another").write_text("holds the inode")
    (shared / name).rename(shared / "old")
    (shared / name).write_text("of a later process with this number")
    scratches.remove(folder)
    assert (shared / name).exists()
    scratches.remove_all()


def test_a_folder_that_belongs_to_somebody_else_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    scratches = ScratchFolders(tmp_path / "data")
    (tmp_path / "elsewhere").mkdir()
    scratches._root.symlink_to(tmp_path / "elsewhere")
    assert scratches.make() is None
    scratches.remove_all()
    assert (tmp_path / "elsewhere").is_dir()


@pytest.mark.parametrize("owner", ["another user", "everybody"])
def test_notes_that_somebody_else_may_have_written_remove_nothing(tmp_path, monkeypatch, owner):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    shared = tmp_path / "shm"
    shared.mkdir()
    name = shared / "of-another-program"
    name.write_text("x")
    scratches = ScratchFolders(tmp_path / "data", shared_memory=shared)
    notes = scratches._root / "planted" / ".shared-memory"
    notes.mkdir(parents=True)
    (notes / name.name).write_text(str(name.stat().st_ino))
    if owner == "everybody":
        scratches._root.chmod(0o777)
    else:
        own = Path.lstat
        monkeypatch.setattr(
            Path,
            "lstat",
            lambda path: os.stat_result([*own(path)[:4], os.getuid() + 1, *own(path)[5:]]),
        )
    scratches.remove_all()
    assert scratches.make() is None
    assert name.exists()
    assert notes.is_dir()
