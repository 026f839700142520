"""A job where trainers and samplers have agents of their own, which are processes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tandem.protocol.authority import Authority, write_certificate
from tandem.protocol.certificate import AGENT_NAME
from tests.support.ports import known_port
from tests.support.stacks import TIED, running
from tests.support.trl_jobs import needs_trl
from tests.support.trl_runs import TrlRun
from tests.support.waiting import wait_until

pytestmark = [needs_trl, pytest.mark.nightly]


class Agents:
    """The agents of trainers and of samplers, each with its own state."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.addresses = {kind: f"127.0.0.1:{known_port()}" for kind in ("trainer", "sampler")}
        authority = Authority.create(folder / "authority")
        write_certificate(folder / "certificate", authority.issue(AGENT_NAME))
        self.settings = {
            "agents": json.dumps(self.addresses),
            "tls_dir": str(folder / "authority"),
            "trainer_ranks": "1",
        }

    @contextmanager
    def agent(self, kind: str) -> Iterator[subprocess.Popen[bytes]]:
        own, logs = self.folder / kind, self.folder / "data" / "logs"
        own.mkdir(exist_ok=True)
        options = {
            "--data-dir": own,
            "--listen": self.addresses[kind],
            "--advertise": "localhost",
            "--tls": self.folder / "certificate",
            "--logs": logs,
        }
        command = [sys.executable, "-m", "tandem.agent"]
        command += [str(word) for option in options.items() for word in option]
        with (self.folder / f"{kind}.log").open("ab") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        try:
            yield process
        finally:
            process.terminate()
            process.send_signal(signal.SIGCONT)
            process.wait(60)


def test_a_job_is_checked_and_runs_on_the_agent_of_trainers_and_waits_while_it_is_absent(
    models: dict[str, Path], tmp_path: Path
) -> None:
    agents = Agents(tmp_path)
    with (
        agents.agent("sampler") as of_samplers,
        agents.agent("trainer") as first,
        running(tmp_path / "data", models={TIED: models[TIED]}, settings=agents.settings) as stack,
    ):
        of_samplers.send_signal(signal.SIGSTOP)  # nobody needs it
        job = TrlRun(stack)
        assert psutil.Process(job.worker()["pid"]).ppid() == first.pid
        job.finished()

        first.kill()
        waiting = TrlRun(stack)
        wait_until(lambda: agents.addresses["trainer"] in waiting.about()["reason"])
        about = waiting.about()
        assert (about["state"], about["queue_position"]) == ("queued", 0)
        assert "no agent answers at" in about["reason"]
        wait_until(lambda: waiting.about()["waited_seconds"] > about["waited_seconds"])
        with agents.agent("trainer") as second:
            assert psutil.Process(waiting.worker()["pid"]).ppid() == second.pid
            waiting.finished()
