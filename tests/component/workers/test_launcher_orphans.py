"""No worker outlives a killed launcher."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.agent.worker_process import group_members
from tests.support.waiting import wait_until

DUMMY = str(Path(__file__).parents[2] / "support" / "dummy_worker.py")

GATEWAY = """
import asyncio, sys, uvloop
from pathlib import Path
from tandem.agent.launcher import ProcessLauncher
from tandem.protocol.worker import WorkerSpec

async def main():
    launcher = ProcessLauncher(
        data_dir=Path(sys.argv[3]),
        command=lambda spec: [sys.executable, sys.argv[2], "family"],
    )
    pids = []
    for name in ("a", "b", "c"):
        handle = await launcher.start(WorkerSpec(
            worker_id=name, kind="sampler", secret="s", model_name="m", model_path="p",
            session_id="s-1",
        ))
        pids.append(handle.pid)
    print("started", *pids, flush=True)
    await asyncio.sleep(600)

(uvloop if sys.argv[1] == "uvloop" else asyncio).run(main())
"""


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_nothing_is_left_after_the_launching_process_was_killed(tmp_path, loop):
    gateway = subprocess.Popen(
        [sys.executable, "-c", GATEWAY, loop, DUMMY, str(tmp_path)], stdout=subprocess.PIPE
    )
    try:
        line = b""
        while not line.startswith(b"started"):
            line = gateway.stdout.readline()
            assert line, "the launching process ended"
        groups = [int(word) for word in line.split()[1:]]
        assert [len(group_members(pgid)) for pgid in groups] == [2, 2, 2]
    finally:
        gateway.send_signal(signal.SIGKILL)
        gateway.wait()
        gateway.stdout.close()
    wait_until(lambda: not any(map(group_members, groups)), what="the workers have ended")
