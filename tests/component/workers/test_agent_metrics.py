"""An agent's metrics and their ports."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import httpx

from tandem.agent.address import socket_path
from tandem.agent.launcher import ProcessLauncher
from tandem.agent.metrics import local_metrics_address, metrics_address_of, worker_port
from tandem.agent.service import Listening, serving
from tandem.protocol.authority import Authority, write_certificate
from tandem.protocol.certificate import AGENT_NAME
from tandem.protocol.worker import WorkerSpec
from tests.support.ports import known_port
from tests.support.waiting import wait_until

DUMMY = str(Path(__file__).parents[2] / "support" / "dummy_worker.py")


def launcher_in(data_dir: Path) -> ProcessLauncher:
    return ProcessLauncher(data_dir=data_dir, command=lambda _: [sys.executable, DUMMY, "serve"])


def spec(number: int) -> WorkerSpec:
    return WorkerSpec(
        worker_id=f"trainer-s-{number}",
        kind="trainer",
        secret="s3",
        model_name="tiny",
        model_path="tiny",
        session_id="s",
        run_id="s:train:0",
    )


async def text_at(address: str) -> str:
    async with httpx.AsyncClient(verify=False) as client:
        return (await client.get(f"http://{address}/metrics", timeout=30)).text


def test_an_agent_takes_its_metrics_port_again(tmp_path):
    found = []
    for _ in range(2):
        command = [sys.executable, "-m", "tandem.agent", "--data-dir", str(tmp_path)]
        environment = {**os.environ, "TANDEM_POOL_PROCESSES": "0"}
        with subprocess.Popen(command, env=environment) as agent:
            try:
                wait_until(socket_path(tmp_path).exists)
                found.append(local_metrics_address(tmp_path))
                text = httpx.get(f"http://{found[-1]}/metrics", verify=False, timeout=30).text
            finally:
                agent.terminate()
    assert found[0] == found[1]
    assert 'tandem_agent_workers{kind="trainer"} 0.0' in text
    assert 'tandem_agent_free_disk_bytes{folder="data"}' in text
    assert "process_cpu_seconds_total" in text


async def test_an_agent_counts_its_workers_and_numbers_their_metrics_ports(tmp_path):
    launcher = launcher_in(tmp_path)
    async with serving(launcher, data_dir=tmp_path):
        for number in range(2):
            await launcher.start(spec(number))
        base = launcher.metrics_port
        specs = [worker.spec.metrics_port for worker in launcher._workers.values()]
        assert specs == [base + 1, base + 2]
        await launcher.stop("trainer-s-0")
        await launcher.start(spec(2))
        specs = [worker.spec.metrics_port for worker in launcher._workers.values()]
        assert specs == [base + 2, base + 1]
        text = await text_at(local_metrics_address(tmp_path))
    assert 'tandem_agent_workers{kind="trainer"} 2.0' in text


async def test_the_metrics_of_an_agent_with_an_address_are_one_port_above(tmp_path):
    authority = Authority.create(tmp_path / "authority")
    write_certificate(tmp_path / "agent", authority.issue(AGENT_NAME))
    address = f"127.0.0.1:{known_port()}"
    listening = Listening(address=address, advertised="localhost", tls=tmp_path / "agent")
    async with serving(launcher_in(tmp_path), data_dir=tmp_path, listening=listening):
        assert "tandem_agent_free_memory_bytes" in await text_at(metrics_address_of(address))


async def test_a_taken_port_costs_the_metrics_and_not_the_agent(tmp_path):
    authority = Authority.create(tmp_path / "authority")
    write_certificate(tmp_path / "agent", authority.issue(AGENT_NAME))
    address = f"127.0.0.1:{known_port()}"
    other, taken = launcher_in(tmp_path / "other"), metrics_address_of(address).split(":")[1]
    (tmp_path / "other").mkdir()
    (tmp_path / "other/agent.metrics").write_text(taken)
    async with serving(other, data_dir=tmp_path / "other"):
        listening = Listening(address=address, advertised="localhost", tls=tmp_path / "agent")
        launcher = launcher_in(tmp_path)
        async with serving(launcher, data_dir=tmp_path, listening=listening):
            assert launcher.metrics_port == 0


def test_a_worker_takes_any_port_when_the_agent_has_none():
    assert worker_port(0, []) == 0
    assert worker_port(65_535, []) == 0
    assert worker_port(100, range(101, 400)) == 0
