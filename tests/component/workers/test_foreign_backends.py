"""A foreign trainer backend without sleep, on shared devices."""

from __future__ import annotations

import asyncio
import dataclasses
import re
from collections.abc import Sequence

import grpc.aio
import pytest

import tandem.agent.launcher
from tandem.agent.launcher import ProcessLauncher
from tandem.protocol.fencing import LEASE_METADATA_KEY
from tandem.protocol.worker import SECRET_METADATA_KEY, WorkerSpec
from tandem.settings.workers import TrainerSettings
from tandem.v1 import common_pb2, trainer_pb2, trainer_pb2_grpc
from tests.support.other_packages import register
from tests.support.tiny_model import write_tiny_model
from tests.support.trainer_worker import datum, request
from tests.support.waiting import until_serving
from tests.support.worker_process import RUN, SECRET, SESSION

BACKEND = """
from trainer_service.backends import Capability
from trainer_service.backends.fsdp2 import Fsdp2Backend

class Backend(Fsdp2Backend):
    capabilities = Fsdp2Backend.capabilities - {Capability.SLEEP}
"""


@dataclasses.dataclass
class Suspender:
    reason: str = ""
    asked: list[tuple[str, int]] = dataclasses.field(default_factory=list)

    def why_not(self) -> str:
        return self.reason

    async def suspend(self, pids: Sequence[int], *, timeout: float) -> None:
        self.asked.append(("suspend", len(pids)))

    async def resume(self, pids: Sequence[int], *, timeout: float) -> None:
        self.asked.append(("resume", len(pids)))


@pytest.fixture
def spec(tmp_path, monkeypatch) -> WorkerSpec:
    """A trainer with the installed backend `foreign`."""
    package = tmp_path / "site"
    register(package, "foreign-backend", foreign="foreign_backend:Backend")
    (package / "foreign_backend.py").write_text(BACKEND)
    monkeypatch.setenv("PYTHONPATH", str(package), prepend=":")
    return WorkerSpec(
        worker_id="trainer-s-1-0",
        kind="trainer",
        secret=SECRET,
        model_name="tiny",
        model_path=str(write_tiny_model(tmp_path / "model")),
        session_id=SESSION,
        run_id=RUN,
        lease=1,
        trainer=TrainerSettings(device="cpu", threads=1, backend="foreign"),
    )


async def test_it_is_refused_with_the_reason_where_its_host_cannot_suspend_it(spec, tmp_path):
    launcher = ProcessLauncher(data_dir=tmp_path, suspender=Suspender("it has no such program"))
    try:
        watch = launcher.watch()
        await launcher.start(spec)
        sentence = r"backend 'foreign' cannot sleep.* cannot suspend it \(it has no such program\)"
        assert re.search(sentence, (await asyncio.wait_for(anext(watch), 240)).reason)
        assert launcher.ids() == ()
    finally:
        await launcher.close()


async def test_suspended_by_its_host_it_computes_nothing_until_it_is_resumed(
    spec, tmp_path, monkeypatch
):
    monkeypatch.setattr(tandem.agent.launcher, "uses_gpu", lambda pid: True)
    suspender = Suspender()
    launcher = ProcessLauncher(data_dir=tmp_path, suspender=suspender)
    try:
        handle = await launcher.start(spec)
        await until_serving(handle)
        async with grpc.aio.insecure_channel(handle.address) as channel:
            trainer = trainer_pb2_grpc.TrainerStub(channel)
            seq_id = 0

            async def compute(lease: int) -> trainer_pb2.ForwardBackwardReply:
                nonlocal seq_id
                seq_id += 1
                header = common_pb2.OperationHeader(
                    run_id=RUN, seq_id=seq_id, previous_seq_id=seq_id - 1
                )
                payload = request([datum([5, 6, 7])]).SerializeToString()
                message = trainer_pb2.ForwardBackwardRequest(header=header, payload=payload)
                return await trainer.ForwardBackward(message, metadata=call(lease), timeout=60)

            def call(lease: int) -> tuple[tuple[str, str], ...]:
                return ((SECRET_METADATA_KEY, SECRET), (LEASE_METADATA_KEY, str(lease)))

            assert not (await compute(1)).HasField("failure")
            told = await trainer.Sleep(common_pb2.SleepRequest(), metadata=call(2), timeout=60)
            assert told.failure.type == "cannot_sleep"
            await launcher.suspend(spec.worker_id, lease=2, timeout=60)
            with pytest.raises(grpc.aio.AioRpcError, match="it is asleep"):
                await compute(2)
            seq_id -= 1
            told = await trainer.Wake(common_pb2.WakeRequest(), metadata=call(3), timeout=60)
            assert told.failure.type == "cannot_sleep"
            await launcher.resume(spec.worker_id, lease=3, timeout=60)
            assert not (await compute(3)).HasField("failure")
        assert suspender.asked == [("suspend", 1), ("resume", 1)]
    finally:
        await launcher.close()
