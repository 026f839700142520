"""A gateway's fleet with an agent that freezes, and trainers on one group, in virtual time."""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import grpc
import grpc.aio

from gateway.checkpoints.base_models import BaseModelEntry
from gateway.metrics import Metrics
from gateway.placement.asks import default_asks
from gateway.placement.groups import groups_of
from gateway.placement.lease import Lease
from gateway.placement.places import Place
from gateway.runs.replay import SentCall, Snapshot
from gateway.runs.restoration import Restoration
from gateway.runs.trainer_host import TrainerHost
from gateway.workers.epoch import Epoch
from gateway.workers.fleet import Fleet
from tandem.agent.host import Host
from tandem.errors import WorkerMayRun
from tandem.protocol.worker import WorkerSpec
from tandem.settings.gateway import GatewaySettings
from tandem.v1 import common_pb2, trainer_pb2
from tests.support.gateway.leased_workers import World as Leases
from tests.support.gateway.model_host import ModelHost, ModelLauncher
from tests.support.gateway.sampler_world import AtOnce, NoDatabase
from tests.support.virtual_time import now, run_in_virtual_time

PATIENCE = 50.0
"""Virtual seconds until a call to a frozen agent fails."""


def with_freezing_agent(scenario):
    def run(tmp_path) -> None:
        world = World(tmp_path)

        async def in_world() -> None:
            await world.open()
            with patch.object(grpc.aio, "insecure_channel", world.launcher.channel):
                await scenario(world)
                world.launcher.answers.set()
                await world.fleet.close()

        run_in_virtual_time(in_world())

    run.__name__ = scenario.__name__
    return run


class FreezingAgent(ModelLauncher):
    """Does nothing while `answers` is not set. Abandoned calls are never carried out.

    `asked` lists the times of stop requests."""

    def __init__(self, host: ModelHost) -> None:
        super().__init__(host)
        self.answers = asyncio.Event()
        self.answers.set()
        self.asked: list[float] = []

    @property
    def reports(self) -> bool:
        return self.answers.is_set()

    async def _answer(self) -> None:
        try:
            async with asyncio.timeout(PATIENCE):
                await self.answers.wait()
        except TimeoutError:
            raise WorkerMayRun("the agent that starts workers answers nothing") from None

    async def start(self, spec: WorkerSpec):
        handle = await super().start(spec)
        await self._answer()
        return handle

    async def stop(self, worker_id: str, *, at_once: bool = False) -> None:
        self.asked.append(now())
        await self._answer()
        await super().stop(worker_id, at_once=at_once)

    async def suspend(self, worker_id: str, *, lease: int, timeout: float) -> None:
        await self._answer()


class World:
    def __init__(self, folder) -> None:
        self.settings = GatewaySettings(data_dir=folder)
        self.model = BaseModelEntry(name="tiny", path=str(folder / "tiny"), max_length=None)

    async def open(self) -> None:
        self.host = ModelHost(AtOnce(random.Random(1)))
        self.launcher = FreezingAgent(self.host)
        self.leases = Leases()
        self.fleet = self.new_fleet()
        await self.fleet.open()

    def new_fleet(self) -> Fleet:
        database: Any = NoDatabase()
        return Fleet(
            settings=self.settings,
            database=database,
            launcher=self.launcher,
            metrics=Metrics(),
            epoch=Epoch(number=1, superseded=lambda: None),
        )

    async def start(self):
        spec = WorkerSpec(
            worker_id="",
            secret="",
            kind="trainer",
            session_id="s",
            model_name=self.model.name,
            model_path=self.model.path,
            start_timeout=60,
        )
        return await self.fleet.start(spec, place="", on_exit=lambda _reason: None)

    def freeze(self) -> None:
        self.launcher.answers.clear()

    def thaw(self) -> None:
        self.launcher.answers.set()

    def trainer(self, name: str) -> Trainer:
        return Trainer(self, name)

    async def started(self, name: str) -> Trainer:
        trainer = self.trainer(name)
        async with trainer.host.lease.use():
            await trainer.start()
        return trainer


class Trainer:
    """The process of one run, which keeps its place until its release."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.released: list[str] = []
        self.run: Any = SimpleNamespace(
            id=name,
            owner="ann",
            session_id="s",
            model=world.model,
            training=None,
            parent="",
            asks=default_asks(world.settings),
        )
        leases: Any = SimpleNamespace(of=lambda _name: world.leases.group)
        places: Any = SimpleNamespace(release_trainer=self.released.append)
        self.host = TrainerHost(
            name,
            first=self.run,
            sampler="",
            fleet=world.fleet,
            settings=world.settings,
            places=places,
            leases=leases,
        )
        (group,) = groups_of(world.settings, Host("host", cores=(0, 1)))
        self.host.settle(Place(key=name, role="trainer", group=group, owner="ann", session_id="s"))

    @property
    def lease(self) -> Lease:
        return self.host.lease

    async def start(self) -> None:
        self.client = await self.host.join(self.run, on_exit=lambda _reason: None)

    async def bring_back(self, calls: int) -> int:
        """Replay `calls` calls with a process that can sleep. Reading each takes 5 s."""

        async def moves(_request) -> common_pb2.SwitchReply:
            return common_pb2.SwitchReply()

        (process,) = self.world.host.workers.values()
        process.Sleep = process.Wake = moves

        class Journal:
            async def read_payload(self, _run_id: str, _seq_id: int) -> bytes:
                await asyncio.sleep(5)
                return b"a batch"

        async def no_definition(_body) -> bytes:
            return b""

        nothing: Any = None
        journal: Any = Journal()
        log: Any = SimpleNamespace(
            complete=True,
            snapshots=[Snapshot()],
            calls_after=lambda _snapshot: [self.sent(seq_id) for seq_id in range(calls)],
            answered_up_to=lambda _snapshot: calls - 1,
        )
        self.restoration = Restoration(
            run=self.run,
            host=self.host,
            log=None,
            journal=journal,
            snapshots=nothing,
            definition_of=no_definition,
            data_dir=nothing,
        )
        return await self.restoration.bring_back(self.client, log)

    def sent(self, seq_id: int) -> SentCall:
        header = common_pb2.OperationHeader(run_id=self.run.id, seq_id=seq_id + 1)
        request = trainer_pb2.ForwardBackwardRequest(header=header).SerializeToString()
        return SentCall(seq_id=seq_id, kind="forward", changes_state=False, request=request)

    async def end(self) -> None:
        await self.host.leave(self.run.id, "its session has ended")
