"""Code in a sandbox can harm neither the test nor its machine, whatever isolates it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psutil
import pytest

from tandem.rl.environments.sandbox import Sandbox, SandboxFailed
from tests.support.waiting import until

ISOLATIONS = ["bubblewrap", "unshare", "limits"]


@pytest.fixture(params=ISOLATIONS)
async def isolation(request, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    try:
        await Sandbox(isolation=request.param).run_program(["true"])
    except SandboxFailed as error:
        pytest.skip(f"not on this machine: {error}")
    yield request.param
    assert [*tmp_path.iterdir()] == []  # no run leaves a file
    await until(lambda: not sandboxed(tmp_path), what="no process of a run is left")


def sandboxed(folder: Path) -> list[psutil.Process]:
    """The processes whose home is in the folder of this test's sandboxes."""
    found = []
    for process in psutil.process_iter():
        try:
            home = process.environ().get("TMPDIR", "")
            command = process.cmdline()
        except psutil.Error:
            continue
        if home.startswith(str(folder)) or str(folder) in " ".join(command):
            found.append(process)
    return found


def below() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def name_of(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.Error:
        return ""


async def test_code_reads_its_input_and_files_and_answers(isolation):
    result = await Sandbox(isolation=isolation).python(
        "import sys, data.numbers\nprint(sys.stdin.read(), open('text').read(), data.numbers.ALL)",
        stdin="in",
        files={"text": b"file", "data/numbers.py": "ALL = [1]"},
    )
    assert (result.stdout, result.stderr) == ("in file [1]\n", "")
    assert result.succeeded


async def test_an_error_and_its_text_come_back(isolation):
    sandbox = Sandbox(isolation=isolation)
    result = await sandbox.python("raise KeyError('x')")
    assert (result.exit_code, result.reason, result.succeeded) == (1, "exited", False)
    assert "KeyError: 'x'" in result.stderr
    missing = await sandbox.run_program(["no-such-program"])
    assert (missing.exit_code, missing.stderr) == (
        127,
        "no-such-program: No such file or directory\n",
    )
    died = await sandbox.python("import os; os.kill(os.getpid(), 9)")
    assert (died.exit_code, died.reason) == (-9, "exited")


async def test_an_infinite_loop_ends_at_the_timeout(isolation):
    result = await Sandbox(isolation=isolation, timeout=2).python(
        "print('begun', flush=True)\nwhile True: pass"
    )
    assert (result.stdout, result.reason, result.exit_code) == ("begun\n", "timeout", -1)


async def test_a_fork_bomb_is_bounded(isolation):
    bomb = "import os\nwhile True:\n try: os.fork()\n except OSError: pass"
    if isolation == "limits":  # on a busy machine, it could outrun the kill
        bomb = "import os, time\nwhile os.fork(): pass\ntime.sleep(600)"
    result = await Sandbox(isolation=isolation, processes=8, timeout=20).python(bomb)
    assert result.reason == "processes"


async def test_memory_is_bounded_for_one_process_and_for_all(isolation):
    sandbox = Sandbox(isolation=isolation, memory_bytes=2**28, timeout=30)
    alone = await sandbox.python("x = bytearray(2**29)")
    assert (alone.exit_code, alone.stderr.splitlines()[-1]) == (1, "MemoryError")
    together = await sandbox.python(
        "import os, time\n"
        "for _ in range(2): os.fork()\n"
        "x = bytearray(b'x') * (100 * 2**20)\n"
        "time.sleep(60)"
    )
    assert together.reason == "memory"


async def test_huge_output_is_bounded(isolation):
    sandbox = Sandbox(isolation=isolation, output_bytes=1000, timeout=60)
    for stream in ("stdout", "stderr"):
        result = await sandbox.python(f"import sys\nwhile True: sys.{stream}.write('é' * 10**6)")
        assert result.reason == "output"
        assert getattr(result, stream) == "é" * 500


async def test_the_disk_is_bounded(isolation):
    sandbox = Sandbox(isolation=isolation, disk_bytes=2**20, timeout=30)
    one = await sandbox.python("open('x', 'wb').write(bytes(2**21))")
    assert "File too large" in one.stderr
    many = await sandbox.python(
        "import time\nfor i in range(9): open(str(i), 'wb').write(b'x' * 2**19)\ntime.sleep(60)"
    )
    assert many.reason == "disk"


async def test_children_that_leave_the_process_group_are_killed(isolation):
    result = await Sandbox(isolation=isolation).python(
        "import os, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0: time.sleep(600)\n"
        "    os._exit(0)\n"
        "os.wait()\n"
        "print('left')"
    )
    assert (result.stdout, result.reason) == ("left\n", "exited")


async def test_locked_folders_and_links_are_deleted(isolation, tmp_path_factory):
    kept = tmp_path_factory.mktemp("kept")
    (kept / "file").touch()
    result = await Sandbox(isolation=isolation).python(
        "import os\n"
        "os.makedirs('a/b/c'); open('a/b/c/d', 'w').close()\n"
        f"os.symlink({str(kept)!r}, 'a/link')\n"
        "os.chmod('a/b/c', 0); os.chmod('a/b', 0)"
    )
    assert result.succeeded
    assert (kept / "file").exists()


async def test_code_that_kills_its_supervisor_ends_too(isolation):
    result = await Sandbox(isolation=isolation, timeout=1).python(
        "import os, time; os.kill(os.getppid(), 9); time.sleep(600)"
    )
    assert result.reason in ("killed", "timeout")  # a namespace protects its first process


async def test_a_cancelled_run_ends_its_processes(isolation):
    run = asyncio.create_task(
        Sandbox(isolation=isolation, timeout=600).run_program(["sleep", "600"])
    )
    await until(lambda: any(name_of(each) == "sleep" for each in below()))
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert not any(name_of(each) == "sleep" for each in below())


async def test_input_that_nobody_reads_is_no_error(isolation):
    result = await Sandbox(isolation=isolation).run_program(["true"], stdin="x" * 10**6)
    assert result.succeeded


async def test_namespaces_have_no_network_and_bubblewrap_shows_no_files(isolation):
    if isolation == "limits":
        pytest.skip("limits isolate nothing")
    code = (
        "import os, socket\n"
        "print(os.path.exists(PATH), [name for _, name in socket.if_nameindex()])"
    )
    secret = Path(__file__)
    found = await Sandbox(isolation=isolation).python(f"PATH = {str(secret)!r}\n{code}")
    assert found.stdout == f"{isolation == 'unshare'} ['lo']\n"
    shared = Sandbox(isolation=isolation, network=True, readable=[secret.parent])
    everything = await shared.python(f"PATH = {str(secret)!r}\n{code}")
    interfaces = [*psutil.net_if_addrs()]
    assert everything.stdout.startswith("True ")
    assert all(name in everything.stdout for name in interfaces)


async def test_nothing_of_the_callers_environment_is_visible(isolation, monkeypatch):
    monkeypatch.setenv("A_SECRET_KEY", "hunter2")
    result = await Sandbox(isolation=isolation).run_program(["env"])
    assert "hunter2" not in result.stdout


async def test_files_stay_inside_the_folder():
    for name in ("../x", "/x", ""):
        with pytest.raises(ValueError, match="not inside"):
            await Sandbox(isolation="limits").run_program(["true"], files={name: ""})


async def test_the_strongest_isolation_that_works_is_found_once():
    sandbox = Sandbox()
    found = await asyncio.gather(*(sandbox.find_isolation() for _ in range(20)))
    assert {*found} <= {*ISOLATIONS}
    assert len({*found}) == 1
    assert (await sandbox.python("print(1)")).stdout == "1\n"


async def test_an_isolation_that_the_machine_lacks_is_named(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SandboxFailed, match="bwrap is not installed"):
        await Sandbox(isolation="bubblewrap").run_program(["true"])
    assert await Sandbox().find_isolation() == "limits"
