"""Agent and gateway start processes despite gRPC's busy threads, which do not survive a fork."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import {main}  # what is to be set before grpc is imported

import asyncio
import grpc.aio
import {loop} as loop
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

CALLERS, CHILDREN = 16, 100

async def main():
    server = grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    enough = asyncio.Event()

    async def talk():
        async with grpc.aio.insecure_channel(address) as channel:
            while not enough.is_set():
                await health_pb2_grpc.HealthStub(channel).Check(
                    health_pb2.HealthCheckRequest(), timeout=30
                )

    talking = [asyncio.create_task(talk()) for _ in range(CALLERS)]
    for _ in range(CHILDREN):
        child = await asyncio.create_subprocess_exec("/bin/true", start_new_session=True)
        print(await child.wait())
    enough.set()
    await asyncio.gather(*talking)
    await server.stop(None)

loop.run(main())
"""


@pytest.mark.parametrize(
    ("main", "loop"), [("tandem.agent.__main__", "asyncio"), ("gateway.__main__", "uvloop")]
)
def test_no_process_dies_between_fork_and_its_program(main, loop):
    script = SCRIPT.replace("{main}", main).replace("{loop}", loop)
    without = {name: each for name, each in os.environ.items() if not name.startswith("GRPC_")}
    done = subprocess.run(
        [sys.executable, "-c", script], env=without, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert set(done.stdout.split()) == {"0"}, "-11 is a segmentation fault"
