"""Trainers behind a launcher that freezes, under a supervisor, in virtual time.

Processes, adapter and hosts are those of the gateway. Workers and launcher are models.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import grpc
import grpc.aio

from gateway.checkpoints.base_models import BaseModelEntry
from gateway.metrics import Metrics
from gateway.runs.recovery.replay_log import SentCall, Snapshot
from gateway.runs.recovery.restoration import Restoration
from gateway.runs.trainer_host import TrainerHost
from gateway.workers.clients import TrainerClient
from gateway.workers.epoch import Epoch
from gateway.workers.groups import WorkerGroup
from gateway.workers.launchers.base import for_each_kind
from gateway.workers.overview import Budgets
from gateway.workers.processes import Processes
from gateway.workers.requests import WorkerRequest
from gateway.workers.roster import Roster
from gateway.workers.run_options import RunOptions
from gateway.workers.table import WorkerRow
from gateway.workers.trainer_adapter import TrainerAdapter
from tandem.errors import CannotSleep, WorkerMayRun
from tandem.protocol.worker import TrainingSpec, WorkerHandle, WorkerSpec
from tandem.settings.gateway import GatewaySettings
from tandem.v1 import common_pb2, trainer_pb2
from tests.support.gateway.memory_table import MemoryTable
from tests.support.gateway.model_host import ModelHost, ModelLauncher
from tests.support.gateway.model_workers import ModelTrainer
from tests.support.gateway.sampler_world import AtOnce
from tests.support.gateway.supervised_workers import CheckedSupervisor
from tests.support.virtual_time import heartbeats_in_virtual_time, now, run_in_virtual_time

PATIENCE = 50.0
"""Virtual seconds until a call to a frozen launcher fails."""

GROUP = WorkerGroup(name="g", kinds=frozenset({"trainer"}), devices=("cuda:0",), host="here")


class SleepingTrainer(ModelTrainer):
    """Notes whether it is `asleep`, and counts its `wakes`. `at_work` is the operation under way,
    0 for none. `foreign` ones do not know how to sleep. Removing a run takes `removal_seconds`."""

    asleep = False
    wakes = 0
    at_work = 0
    foreign = False
    removal_seconds = 0.0

    async def Progress(self, request):
        return trainer_pb2.ProgressReply(seq_id=self.at_work)

    async def RemoveRun(self, request):
        await asyncio.sleep(self.removal_seconds)
        return await super().RemoveRun(request)

    async def Sleep(self, request):
        assert not self.at_work, "it was put to sleep in the middle of an operation"
        if self.foreign:
            return common_pb2.SwitchReply(failure=CannotSleep("it cannot").to_failure())
        self.asleep = True
        return common_pb2.SwitchReply()

    async def Wake(self, request):
        self.asleep = False
        self.wakes += 1
        return common_pb2.SwitchReply()


class FreezingLauncher(ModelLauncher):
    """Answers while `answers` is set. A frozen launcher hears a start and carries it out. It
    carries out no stop whose caller has given up. `asked` has the times of stop requests."""

    trainer = SleepingTrainer

    def __init__(self, host: ModelHost) -> None:
        super().__init__(host)
        self.answers = asyncio.Event()
        self.answers.set()
        self.asked: list[float] = []

    @property
    def reports(self) -> bool:  # type: ignore[override]
        return self.answers.is_set()

    async def _answer(self) -> None:
        try:
            async with asyncio.timeout(PATIENCE):
                await self.answers.wait()
        except TimeoutError:
            raise WorkerMayRun("the agent that starts workers answers nothing") from None

    async def start(self, spec: WorkerSpec) -> WorkerHandle:
        handle = await super().start(spec)
        await self._answer()
        return handle

    async def stop(self, worker_id: str, *, at_once: bool = False) -> None:
        self.asked.append(now())
        await self._answer()
        await super().stop(worker_id, at_once=at_once)

    async def suspend(self, worker_id: str, *, lease: int, timeout: float) -> None:
        await self._answer()

    async def resume(self, worker_id: str, *, lease: int, timeout: float) -> None:
        await self._answer()


class FreezingWorld:
    """One group, whose workers take turns, and one gateway after the other."""

    def __init__(self, folder: Path) -> None:
        self.settings = GatewaySettings(data_dir=folder)
        self.model = BaseModelEntry(name="tiny", path=str(folder / "tiny"), max_length=None)
        self.host = ModelHost(AtOnce(random.Random(1)))
        self.table = MemoryTable()
        self.epoch = 0

    async def open(self) -> None:
        self.launcher = FreezingLauncher(self.host)
        await self.new_gateway()

    async def new_gateway(self) -> None:
        self.epoch += 1
        self.processes = Processes(
            settings=self.settings,
            launchers=for_each_kind(self.launcher),
            metrics=Metrics(),
            epoch=Epoch(number=self.epoch, superseded=lambda: None),
        )
        self.adapter = TrainerAdapter(self.processes)
        roster = Roster(
            table=self.table,
            groups=[GROUP],
            adapters={"trainer": self.adapter},
            settings=self.settings.sharing,
            budgets=Budgets(silence=60.0),
            epoch=self.epoch,
            clock=now,
        )
        self.supervisor = CheckedSupervisor(roster)
        await self.processes.find_processes(self.supervisor)
        await self.supervisor.open()

    async def close_gateway(self) -> None:
        """End the gateway, and leave everything to the next one."""
        await self.supervisor.close()
        await self.processes.close(leaving=True)

    def freeze(self) -> None:
        self.launcher.answers.clear()

    def thaw(self) -> None:
        self.launcher.answers.set()

    def row(self, key: str) -> WorkerRow:
        return self.supervisor.roster.rows[key]

    async def trainer(self, name: str, *, host_bytes: int = 0) -> Trainer:
        """Return the trainer of a new run."""
        trainer = Trainer(self, name)
        request = WorkerRequest(
            key=name, kind="trainer", owner="ann", session="s", host_bytes=host_bytes
        )
        await trainer.host.place(request, name)
        return trainer

    async def started(self, name: str) -> Trainer:
        trainer = await self.trainer(name)
        await trainer.start()
        return trainer

    async def left(self, *, host_bytes: int = 0) -> tuple[SleepingTrainer, Trainer]:
        """Return the process of run `a` that the gateway before has left, and the run's trainer in
        this one."""
        await (await self.trainer("a", host_bytes=host_bytes)).start()
        process = self.process
        await self.close_gateway()
        await self.new_gateway()
        return process, Trainer(self, "a")

    @property
    def process(self) -> SleepingTrainer:
        """The only process."""
        (process,) = self.host.workers.values()
        assert isinstance(process, SleepingTrainer)
        return process


class Trainer:
    """The trainer of one run. `told` has the reasons for which its processes ended."""

    def __init__(self, world: FreezingWorld, name: str) -> None:
        self.world = world
        self.told: list[str] = []
        self.run = self.run_named(name)
        self.run.host = self.host = TrainerHost(
            name,
            first=self.run,
            sampler="",
            settings=world.settings,
            supervisor=world.supervisor,
            adapter=world.adapter,
        )

    def run_named(self, name: str) -> Any:
        return SimpleNamespace(
            id=name,
            owner="ann",
            session_id="s",
            model=self.world.model,
            training=TrainingSpec(),
            parent="",
            options=RunOptions(),
            log=None,
            restoring="",
        )

    async def start(self) -> None:
        self._note_taken(await self.host.join(self.run))

    async def take_up(self) -> bool:
        client = await self.host.take_up(self.run)
        if client is not None:
            self._note_taken(client)
        return client is not None

    def _note_taken(self, client: TrainerClient) -> None:
        self.client = client
        self.host.exited.add_done_callback(lambda exited: self.told.append(exited.result()))

    async def compute(self, seconds: float = 0.0) -> str:
        """Have the devices for some seconds, and return the name of the process."""
        async with self.host.use() as row:
            await asyncio.sleep(seconds)
            return row.process

    async def leave(self) -> None:
        await self.host.leave(self.run.id)

    async def bring_back(self, calls: int) -> int:
        """Replay so many calls. Reading each one takes 5 s."""

        class Journal:
            async def read_payload(self, _run_id: str, _seq_id: int) -> bytes:
                await asyncio.sleep(5)
                return b"a batch"

        async def no_definition(_body: object, *, session_id: str) -> bytes:
            return b""

        tools: Any = SimpleNamespace(journal=Journal(), definition_of=no_definition)
        log: Any = SimpleNamespace(
            complete=True,
            snapshots=[Snapshot()],
            calls_after=lambda _snapshot: [self._sent(seq_id) for seq_id in range(calls)],
            answered_up_to=lambda _snapshot: calls - 1,
        )
        self.restoration = Restoration(run=self.run, tools=tools)
        return await self.restoration.bring_back(self.client, log)

    def _sent(self, seq_id: int) -> SentCall:
        header = common_pb2.OperationHeader(run_id=self.run.id, seq_id=seq_id + 1)
        request = trainer_pb2.ForwardBackwardRequest(header=header).SerializeToString()
        return SentCall(seq_id=seq_id, kind="forward", request=request)


def with_freezing_launcher(
    scenario: Callable[[FreezingWorld], Coroutine[None, None, None]],
) -> Callable[[Path], None]:
    """Make a test of a scenario. Heartbeats follow the virtual clock."""

    def run(tmp_path: Path) -> None:
        world = FreezingWorld(tmp_path)

        async def in_world() -> None:
            await world.open()
            channel = world.launcher.channel
            with heartbeats_in_virtual_time(), patch.object(grpc.aio, "insecure_channel", channel):
                await scenario(world)
                world.supervisor.raise_fault()
                await world.close_gateway()

        run_in_virtual_time(in_world())

    run.__name__ = scenario.__name__
    return run
