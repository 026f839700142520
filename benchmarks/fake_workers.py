"""An agent that starts fake workers: `fake_workers.py agent DATA`.

A fake engine answers each prompt with its reverse. After SIGUSR2 it holds all samples. SIGUSR1 lets
it answer them, and writes the number of received ones to `received.json` beside the model."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tandem.protocol.worker import WorkerKind, WorkerSpec

if TYPE_CHECKING:
    from tandem.protocol.worker_server import WorkerServer

_NICENESS = 10
"""The workers have machines of their own."""


def run_agent(data_dir: Path) -> int:
    from tandem.agent import service
    from tandem.agent.launcher import ProcessLauncher

    def command(kind: WorkerKind) -> list[str]:
        return [sys.executable, str(Path(__file__).resolve()), kind]

    vars(service)["ProcessLauncher"] = partial(ProcessLauncher, command=command)
    return service.run(data_dir)


def run_worker(arguments: Sequence[str]) -> None:
    from tandem.protocol.worker_link import launcher_link

    link = launcher_link(arguments)
    spec = link.read_spec()
    link.hold_lifeline()
    os.nice(_NICENESS)

    from prometheus_client import CollectorRegistry

    from tandem.protocol.worker_server import WorkerServer
    from tandem.v1 import trainer_pb2_grpc
    from tests.support.gateway.fake_trainer import FakeTrainer

    async def serve() -> None:
        server = WorkerServer(spec)
        if spec.kind == "trainer":
            trainer = FakeTrainer(spec)  # type: ignore[abstract] # takes no snapshots
            trainer_pb2_grpc.add_TrainerServicer_to_server(trainer, server.grpc)
        else:
            _add_engine(server, spec)
        link.report(await server.listen(CollectorRegistry()))
        await server.set_serving(True)
        await server.grpc.wait_for_termination()

    asyncio.run(serve())


def _add_engine(server: WorkerServer, spec: WorkerSpec) -> None:
    from tandem.v1 import sampler_pb2_grpc
    from tests.support.gateway.fake_sampler import FakeSampler

    engine, loop = FakeSampler(spec), asyncio.get_running_loop()
    sampler_pb2_grpc.add_SamplerServicer_to_server(engine, server.grpc)

    def answer() -> None:
        ids = [request.operation_id for request in engine.requests]
        received = {"requests": len(ids), "different": len(set(ids))}
        (Path(spec.model_path).parent / "received.json").write_text(json.dumps(received))
        engine.gate.set()

    loop.add_signal_handler(signal.SIGUSR1, answer)
    loop.add_signal_handler(signal.SIGUSR2, engine.gate.clear)


if __name__ == "__main__":
    if sys.argv[1] == "agent":
        sys.exit(run_agent(Path(sys.argv[2])))
    run_worker(sys.argv[2:])
