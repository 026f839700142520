"""No machine of `make test-nfs` outlives the program that started it. A stand-in replaces qemu."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.nfs.__main__ import Power
from tests.nfs.machines import Kernel, Machine, Server
from tests.support.processes import marked
from tests.support.waiting import wait_until

pytestmark = pytest.mark.skipif(shutil.which("setpriv") is None, reason="setpriv is not installed")

BOOTS = """
import pathlib, sys, time
from concurrent.futures import ThreadPoolExecutor
from tests.nfs.machines import Kernel, Machine
folder = pathlib.Path(sys.argv[1])
machine = Machine(Kernel(folder, folder), folder, "server", 1, ThreadPoolExecutor(1))
machine.boot(folder, megabytes=1)
print("booted", flush=True)
time.sleep(60)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    qemu = tmp_path / "qemu-system-x86_64"
    qemu.write_text("#!/bin/sh\nexec sleep 60\n")
    qemu.chmod(0o755)
    path = f"{tmp_path}:/usr/sbin:/usr/bin:/sbin:/bin"
    monkeypatch.setenv("PATH", path)
    monkeypatch.setenv("TANDEM_TEST_MACHINES_MARK", str(tmp_path))
    return tmp_path


def machines(folder) -> list[int]:
    return [each.pid for each in marked(str(folder)) if each.command.startswith("sleep")]


def test_a_machine_ends_with_a_killed_program(folder):
    program = subprocess.Popen(
        [sys.executable, "-c", BOOTS, str(folder)], stdout=subprocess.PIPE, text=True
    )
    assert program.stdout is not None and program.stdout.readline() == "booted\n"
    wait_until(lambda: machines(folder), what="a machine", timeout=30)
    program.kill()
    program.wait(timeout=30)
    program.stdout.close()
    wait_until(lambda: not machines(folder), what="the end of the machine", timeout=30)


def test_a_machine_outlives_the_thread_that_asked_for_it(folder):
    with ThreadPoolExecutor(1) as starter:
        machine = Machine(Kernel(folder, folder), folder, "server", 1, starter)
        asking = threading.Thread(target=machine.boot, args=(folder,), kwargs={"megabytes": 1})
        asking.start()
        asking.join(timeout=30)
        wait_until(lambda: machines(folder), what="a machine", timeout=30)
        machine.check()
        machine.kill()
        assert not machines(folder)


def test_a_server_that_boots_while_the_run_fails_is_killed(folder):
    booting, failed = threading.Event(), threading.Event()

    class SlowServer(Server):
        def start(self) -> None:
            booting.set()
            assert failed.wait(timeout=30)
            self.boot(self.folder, megabytes=1)

    with ThreadPoolExecutor(1) as starter:
        server = SlowServer(Kernel(folder, folder), folder, "server", 1, starter)
        power = Power(server, seed=1, every=0.01)
        power.start()
        assert booting.wait(timeout=30)
        threading.Timer(0.1, failed.set).start()
        power.stop()
        assert not power.is_alive()
        assert not machines(folder)
