"""Many workers that start at once."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.agent.launcher import ProcessLauncher
from tandem.protocol.worker import WorkerSpec
from tests.support.waiting import until_serving

DUMMY = str(Path(__file__).parents[2] / "support" / "dummy_worker.py")
MANY = 20


def spec(number: int) -> WorkerSpec:
    kind = "trainer" if number % 2 else "sampler"
    return WorkerSpec(
        worker_id=f"{kind}-s-1-{number}",
        kind=kind,
        secret="the secret",
        model_name="tiny",
        model_path="models/tiny",
        session_id="s-1",
        start_timeout=240,
    )


@pytest.mark.parametrize("round_", range(3))
async def test_twenty_workers_that_start_at_once_all_get_their_ports(tmp_path, round_):
    launcher = ProcessLauncher(
        data_dir=tmp_path, command=lambda _: [sys.executable, DUMMY, "serve"]
    )
    try:
        handles = await asyncio.gather(*(launcher.start(spec(number)) for number in range(MANY)))
        await asyncio.gather(*(until_serving(each) for each in handles))
        ports = [int(each.address.rpartition(":")[2]) for each in handles]
        ports += [each.metrics_port for each in handles]
        assert len(set(ports)) == 2 * MANY
    finally:
        await launcher.close()


def test_a_worker_shares_its_port_with_no_other_program():
    """By default a gRPC server shares its port."""
    script = (
        "import asyncio, socket\n"
        "from prometheus_client import CollectorRegistry\n"
        "from tandem.protocol.worker_server import WorkerServer\n"
        "from tandem.protocol.worker import WorkerSpec\n"
        "async def main():\n"
        "    spec = WorkerSpec(worker_id='t', kind='trainer', secret='s', model_name='m',\n"
        "                      model_path='m', session_id='s')\n"
        "    server = WorkerServer(spec)\n"  # kept: its port closes when it is collected
        "    report = await server.listen(CollectorRegistry())\n"
        "    print(report.address.rpartition(':')[2], flush=True)\n"
        "    await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as worker:
        try:
            assert worker.stdout is not None
            port = int(worker.stdout.readline())
            with socket.socket() as other, pytest.raises(OSError, match="in use"):
                other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                other.bind(("127.0.0.1", port))
        finally:
            worker.kill()
