from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry

from tandem.protocol.fencing import Fence
from tandem.telemetry import get_log
from tandem.v1 import common_pb2, trainer_pb2
from tests.support.local_trainer import make, make_rank
from tests.support.losses.batches import mixed_data
from tests.support.trainer_worker import request
from tests.support.waiting import until
from tests.support.worker_process import RUN
from trainer_service.service.engine_thread import EngineThread
from trainer_service.service.hosted_runs import HostedRuns
from trainer_service.service.metrics import TrainerMetrics
from trainer_service.service.operations import Operations
from trainer_service.service.servicer import TrainerServicer

DAMAGED = b"\xff no message"


def call(number: int, payload: bytes) -> trainer_pb2.ForwardBackwardRequest:
    header = common_pb2.OperationHeader(run_id=RUN, seq_id=number, previous_seq_id=number - 1)
    return trainer_pb2.ForwardBackwardRequest(header=header, payload=payload)


async def test_batches_are_read_in_advance_and_computed_in_their_turn(models, monkeypatch):
    read: list[int] = []
    read_batch = Operations.read_batch

    def noted(self: Operations, request: trainer_pb2.ForwardBackwardRequest) -> Any:
        read.append(request.header.seq_id)
        return read_batch(self, request)

    monkeypatch.setattr(Operations, "read_batch", noted)
    engine = EngineThread(
        start=lambda: HostedRuns(make_rank(models["qwen3"]), run_id=RUN),
        heartbeat=60,
        on_broken=lambda error: None,
    )
    servicer = TrainerServicer(
        engine=engine,
        run_id=RUN,
        operation_timeout=60,
        metrics=TrainerMetrics(CollectorRegistry()),
        log=get_log(),
        broken=asyncio.get_running_loop().create_future(),
        fence=Fence(0),
    )
    engine.run()
    busy = threading.Event()
    engine.submit(lambda runs: busy.wait(60))
    payload = request(mixed_data()).SerializeToString()
    context: Any = SimpleNamespace(time_remaining=lambda: None)
    answers = [
        asyncio.create_task(servicer.ForwardBackward(call(number, each), context))
        for number, each in enumerate((payload, DAMAGED, payload), 1)
    ]
    await until(lambda: read == [1, 2, 3])
    assert not any(answer.done() for answer in answers)
    busy.set()
    first, damaged, last = await asyncio.gather(*answers)
    assert read == [1, 2, 3]
    assert damaged.failure.type == "malformed_payload"
    alone = make(models["qwen3"], None).forward_backward(call(1, payload))
    assert first.output == last.output == alone.output
