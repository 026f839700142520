"""A later gateway finds a trainer: trainer and agent refuse the earlier one."""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from gateway.metrics import Metrics
from gateway.workers.clients import CallOrder, TrainerClient
from gateway.workers.epoch import Epoch
from gateway.workers.launchers.agent import AgentLauncher
from gateway.workers.launchers.base import for_each_kind
from gateway.workers.processes import Processes
from tandem.agent.launcher import ProcessLauncher
from tandem.agent.service import serving
from tandem.errors import GatewaySuperseded
from tandem.protocol.worker import WorkerSpec
from tandem.settings.gateway import GatewaySettings
from tandem.settings.workers import TrainerSettings
from tests.support.tiny_model import write_tiny_model

RUN = "s-1:train:0"


class Gateway:
    """A gateway's connections. It ends like a killed one: its workers stay."""

    def __init__(self, data_dir: Path, *, epoch: int) -> None:
        self.superseded: list[int] = []
        settings = GatewaySettings(data_dir=data_dir)
        mine = Epoch(number=epoch, superseded=lambda: self.superseded.append(epoch))
        self.launcher = AgentLauncher(data_dir=data_dir, timeout=120, epoch=mine)
        self.processes = Processes(
            settings=settings,
            launchers=for_each_kind(self.launcher),
            metrics=Metrics(),
            epoch=mine,
        )

    @asynccontextmanager
    async def opened(self):
        await self.processes.find_processes(MagicMock())
        try:
            yield self
        finally:
            await self.processes.close(leaving=True)


@pytest.fixture
async def gateways(tmp_path):
    """Opens gateways on one directory with rising epochs."""
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(
            serving(ProcessLauncher(data_dir=tmp_path), data_dir=tmp_path)
        )

        async def open_(epoch: int) -> Gateway:
            return await stack.enter_async_context(Gateway(tmp_path, epoch=epoch).opened())

        yield open_


async def test_an_earlier_gateway_is_refused_by_the_trainer_that_a_later_one_has_found(
    gateways, tmp_path
):
    model = write_tiny_model(tmp_path / "tiny")
    first = await gateways(epoch=1)
    spec = WorkerSpec(
        worker_id="trainer-s-1-0",
        secret="",
        kind="trainer",
        session_id="s-1",
        run_id=RUN,
        model_name="tiny",
        model_path=str(model),
        trainer=TrainerSettings(),
    )
    worker = await first.processes.start(spec, key=RUN)
    trainer = TrainerClient(worker, run_id=RUN, timeout=60, window=4, calls=CallOrder())
    about = await trainer.describe()
    second = await gateways(epoch=2)
    with pytest.raises(GatewaySuperseded, match=r"epoch 2\) has taken over"):
        await trainer.progress()
    assert first.superseded == [1]
    with pytest.raises(GatewaySuperseded, match=r"this one \(epoch 1\)"):
        await first.launcher.list()
    assert first.superseded == [1, 1]
    adopted = await second.processes.take_up(spec.worker_id, key=RUN, lease=0, timeout=60)
    trainer = TrainerClient(adopted, run_id=RUN, timeout=60, window=4, calls=CallOrder())
    assert await trainer.describe() == about
    assert second.superseded == []
    await second.processes.stop(spec.worker_id, at_once=True)
