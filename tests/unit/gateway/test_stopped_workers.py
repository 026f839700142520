"""What is known of a worker that was stopped: in virtual time, with an agent that freezes, answers
later, breaks off and is replaced."""

from __future__ import annotations

import asyncio
import contextlib
import random
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import grpc
import grpc.aio
import pytest

from gateway.checkpoints.base_models import BaseModelEntry
from gateway.metrics import Metrics
from gateway.placement.asks import default_asks
from gateway.placement.groups import groups_of
from gateway.placement.lease import Lease
from gateway.placement.lease_records import LeaseRecord
from gateway.placement.places import Place
from gateway.runs.replay import SentCall, Snapshot
from gateway.runs.restoration import Restoration
from gateway.runs.trainer_host import DevicesLost, TrainerHost
from gateway.workers.epoch import Epoch
from gateway.workers.fleet import Fleet
from gateway.workers.launchers.agent import AgentLauncher
from tandem.errors import CannotSleep, WorkerMayRun, WorkerStartFailed
from tandem.host import Host
from tandem.settings import GatewaySettings
from tandem.v1 import agent_pb2, common_pb2, trainer_pb2
from tandem.worker import TrainingSpec, WorkerSpec
from tests.support.gateway.leased_workers import World as Leases
from tests.support.gateway.model_host import ModelHost, ModelLauncher
from tests.support.gateway.model_workers import ModelTrainer
from tests.support.gateway.sampler_world import AtOnce, NoDatabase
from tests.support.virtual_time import run_in_virtual_time

PATIENCE = 50.0
"""Virtual seconds after which a call to an agent that does not answer fails."""


def in_virtual_time(scenario):
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


def now() -> float:
    return asyncio.get_running_loop().time()


class FreezingAgent(ModelLauncher):
    """Does nothing while `answers` is not set; what it was asked for meanwhile and nobody waits for
    any more, it does not do later either. `asked` has when it was asked to stop a worker."""

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
    """A gateway's fleet, whose agent may freeze, and two trainers on the devices of one group."""

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
        return await self.fleet.start(
            kind="trainer",
            session_id="s",
            model=self.model,
            start_timeout=60,
            on_exit=lambda _reason: None,
        )

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
    """The process of one run, which keeps its place until it is released."""

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
        """Replay so many calls, with a process that can sleep; before each, the journal is read for
        5 s."""

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


# --- The fleet ------------------------------------------------------------------------------------


@in_virtual_time
async def test_a_worker_is_stopped_when_the_agent_says_so_and_not_before(world):
    worker = await world.start()
    world.freeze()
    stop = asyncio.create_task(world.fleet.stop(worker, reason="over"))
    await asyncio.sleep(1000)
    assert not stop.done()
    world.thaw()
    await stop
    assert world.host.workers == {}


@in_virtual_time
async def test_an_agent_that_does_not_answer_is_asked_again_after_a_pause(world):
    worker = await world.start()
    world.freeze()
    stop = asyncio.create_task(world.fleet.stop(worker, reason="over"))
    await asyncio.sleep(1000)
    gaps = [b - a for a, b in zip(world.launcher.asked, world.launcher.asked[1:], strict=False)]
    assert len(gaps) > 10
    assert min(gaps) == pytest.approx(PATIENCE + 5)
    world.thaw()
    await stop


@in_virtual_time
async def test_a_stop_goes_on_when_nobody_waits_for_it_any_more(world):
    worker = await world.start()
    world.freeze()
    stop = asyncio.create_task(world.fleet.stop(worker, reason="over"))
    await asyncio.sleep(1)
    stop.cancel()
    await asyncio.sleep(1000)
    world.thaw()
    await asyncio.sleep(1)
    assert world.host.workers == {}


@in_virtual_time
async def test_the_agent_is_asked_no_more_often_when_several_wait_for_the_same_end(world):
    worker = await world.start()
    world.freeze()
    for _ in range(20):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(50):
                await world.fleet.stop(worker, reason="over", at_once=True)
    assert len(world.launcher.asked) < 1000 / PATIENCE
    world.thaw()
    await world.fleet.stop(worker, reason="over", at_once=True)


@in_virtual_time
async def test_a_start_that_nobody_answered_fails_when_nothing_of_the_worker_is_left(world):
    world.freeze()
    start = asyncio.create_task(world.start())
    await asyncio.sleep(1000)
    assert not start.done()
    assert len(world.host.workers) == 1, "the agent has heard of it"
    world.thaw()
    with pytest.raises(WorkerStartFailed, match="answers nothing"):
        await start
    assert world.host.workers == {}


@in_virtual_time
async def test_a_worker_that_was_given_up_is_told_to_have_ended_when_it_is_known(world):
    worker = await world.start()
    world.freeze()
    world.fleet.give_up(worker, reason="it is silent")
    await asyncio.sleep(1000)
    assert [record.worker for record in world.fleet.all()] == [worker]
    world.thaw()
    await world.fleet.end(worker, reason="it is silent")
    assert world.fleet.all() == []


@in_virtual_time
async def test_a_gateway_that_stops_leaves_what_it_could_not_stop_to_the_next_one(world):
    worker = await world.start()
    world.freeze()
    stop = asyncio.create_task(world.fleet.stop(worker, reason="over"))
    await asyncio.sleep(1)
    await world.fleet.close(leaving=True)
    await asyncio.gather(stop, return_exceptions=True)
    assert list(world.host.workers) == [worker.worker_id]
    asked = len(world.launcher.asked)
    world.thaw()
    await asyncio.sleep(1000)
    assert len(world.launcher.asked) == asked, "the one before asks no more"
    world.fleet = world.new_fleet()
    await world.fleet.open()
    await world.fleet.stop_left()
    assert world.host.workers == {}


@in_virtual_time
async def test_a_connection_that_broke_waits_for_the_end_while_nobody_could_report_it(world):
    died = asyncio.Event()
    world.freeze()
    waiting = asyncio.create_task(world.fleet.await_exit(died, patience=5))
    await asyncio.sleep(1000)
    assert not waiting.done()
    world.thaw()
    began = now()
    await waiting
    assert now() - began <= 10, "it answers, and reports no end"


# --- The lease ------------------------------------------------------------------------------------


@in_virtual_time
async def test_a_lease_does_not_move_while_the_agent_cannot_say_that_its_holder_is_gone(world):
    """The holder does not sleep, and is to be killed for it."""
    a, b = await world.started("a"), world.trainer("b")
    (holder,) = world.host.workers.values()
    holder.frozen = True
    world.freeze()
    waits = asyncio.create_task(b.lease.enter())
    await asyncio.sleep(5000)
    assert not waits.done()
    assert a.lease.state == "sleeping"
    world.thaw()
    async with asyncio.timeout(60):
        await waits
    assert holder.died.done()
    b.lease.leave()


@in_virtual_time
async def test_a_run_that_ends_gives_up_place_and_lease_when_its_trainer_is_gone(world):
    a, b = await world.started("a"), world.trainer("b")
    (holder,) = world.host.workers.values()
    world.freeze()
    close = asyncio.create_task(a.end())
    waits = asyncio.create_task(b.lease.enter())
    await asyncio.sleep(5000)
    assert not waits.done() and not close.done()
    assert not a.released
    world.thaw()
    async with asyncio.timeout(60):
        await waits
        await close
    assert holder.died.done()
    assert a.released == ["a"]
    b.lease.leave()


@in_virtual_time
async def test_a_stop_that_was_cancelled_leaves_the_lease_to_the_stop_that_follows(world):
    """A run ends while its trainer is stopped to be restored."""
    a, b = await world.started("a"), world.trainer("b")
    world.freeze()
    stop = asyncio.create_task(a.host.end_process(a.client, "it is of no use"))
    await asyncio.sleep(1)
    stop.cancel()
    close = asyncio.create_task(a.end())
    waits = asyncio.create_task(b.lease.enter())
    await asyncio.sleep(1000)
    assert not waits.done() and not close.done()
    world.thaw()
    async with asyncio.timeout(60):
        await waits
    b.lease.leave()


@in_virtual_time
async def test_a_stop_that_nobody_waits_for_any_more_gives_the_devices_free_all_the_same(world):
    a, b = await world.started("a"), world.trainer("b")
    world.freeze()
    stop = asyncio.create_task(a.host.end_process(a.client, "it is of no use"))
    await asyncio.sleep(1)
    stop.cancel()
    await asyncio.sleep(1000)
    assert a.lease.present
    world.thaw()
    async with asyncio.timeout(60), b.lease.use():
        assert a.host.worker is None
    async with a.lease.use():
        await a.start()


@in_virtual_time
async def test_a_trainer_that_is_brought_back_leaves_others_the_devices_between_its_calls(world):
    a, b = await world.started("a"), world.trainer("b")
    bringing_back = asyncio.create_task(a.bring_back(calls=5))
    for _ in range(3):
        async with asyncio.timeout(10), b.lease.use():
            await asyncio.sleep(1)
    assert not bringing_back.done()
    assert await bringing_back == 5


@in_virtual_time
async def test_a_trainer_that_ends_while_it_waits_for_its_devices_did_not_die_of_its_call(world):
    a, b = await world.started("a"), world.trainer("b")
    (process,) = world.host.workers.values()
    bringing_back = asyncio.create_task(a.bring_back(calls=5))
    async with b.lease.use():
        await asyncio.sleep(10)
        process.kill()
    with pytest.raises(DevicesLost):
        await bringing_back
    assert a.restoration.at is None


@in_virtual_time
async def test_gradients_of_a_run_that_leaves_its_trainer_to_others_hold_the_devices_no_more(world):
    a = await world.started("a")
    run: Any = SimpleNamespace(id="b", training=TrainingSpec())
    a.host.runs.add(run.id)
    async with a.lease.use(begins_step=run.id):
        await a.host.join(run, on_exit=lambda _reason: None)
    await a.host.leave(run.id, "its session has ended")
    assert a.host.hosted == {"a"}
    assert not a.lease.in_step


# --- Trainers that an earlier gateway has left ----------------------------------------------------


class LeftTrainer(ModelTrainer):
    """Sleeps when it is at no operation; `at_work` is the one that it is at."""

    asleep = False
    at_work = 0
    hosted = ("a",)

    async def Describe(self, request):
        return trainer_pb2.DescribeTrainerReply(run_ids=self.hosted, last_seq_id=1)

    async def RemoveRun(self, request):
        await asyncio.sleep(1500)  # it is at something of the gateway before
        return trainer_pb2.RemoveRunReply()

    async def Progress(self, request):
        return trainer_pb2.ProgressReply(seq_id=self.at_work)

    async def Sleep(self, request):
        assert not self.at_work
        self.asleep = True
        return common_pb2.SwitchReply()

    async def Wake(self, request):
        self.asleep = False
        return common_pb2.SwitchReply()


class ForeignTrainer(LeftTrainer):
    """One whose backend does not know how to sleep."""

    async def Sleep(self, request):
        return common_pb2.SwitchReply(failure=CannotSleep("it cannot").to_failure())


async def left(world: World, kind: type[LeftTrainer] = LeftTrainer) -> tuple[LeftTrainer, Trainer]:
    """A trainer of the gateway before, which had the devices there, and the run's in this one."""
    spec = WorkerSpec(
        worker_id="left",
        kind="trainer",
        secret="a secret",
        model_name="tiny",
        model_path="tiny",
        session_id="s",
        run_id="a",
    )
    process = world.host.workers["left"] = kind(spec, world.host.misfortune)
    await world.fleet.close(leaving=True)
    world.fleet = world.new_fleet()
    await world.fleet.open()
    world.leases.records.rows["a"] = LeaseRecord(held=True, token=1, since=0.0, seconds=0.0)
    return process, world.trainer("a")


@in_virtual_time
async def test_a_trainer_that_nobody_adopted_sleeps_when_another_needs_its_devices(world):
    process, a = await left(world)
    assert a.lease.state == "held"
    b = world.trainer("b")
    async with asyncio.timeout(60), b.lease.use():
        assert process.asleep
    assert world.host.workers == {"left": process}


@in_virtual_time
async def test_a_trainer_that_was_put_to_sleep_before_its_adoption_is_adopted_and_woken(world):
    process, a = await left(world)
    async with world.trainer("b").lease.use():
        pass
    assert await a.host.adopt(a.run, on_exit=lambda _reason: None) is not None
    assert process.asleep
    async with asyncio.timeout(60), a.lease.use() as token:
        assert not process.asleep
        assert a.host.worker.lease == token


@in_virtual_time
async def test_a_trainer_that_nobody_adopted_ends_what_it_is_at_before_it_sleeps(world):
    process, _ = await left(world)
    process.at_work = 2
    waits = asyncio.create_task(world.trainer("b").lease.enter())
    await asyncio.sleep(30)
    assert not waits.done()
    process.at_work = 0
    async with asyncio.timeout(60):
        await waits
    assert process.asleep


@in_virtual_time
async def test_a_trainer_that_its_host_suspends_counts_as_its_session_said(world):
    _, a = await left(world, ForeignTrainer)
    a.lease.residence.said = 5
    async with asyncio.timeout(60), world.trainer("b").lease.use():
        assert a.lease.residence.slept == "host"
        assert world.leases.memory.used == 5


@in_virtual_time
async def test_a_run_may_end_while_its_trainer_is_to_sleep_that_nobody_adopted(world):
    process, a = await left(world)
    a.host.runs.add("other")
    process.at_work = 2
    waits = asyncio.create_task(world.trainer("b").lease.enter())
    await asyncio.sleep(30)
    a.host.runs.discard("other")
    process.at_work = 0
    async with asyncio.timeout(60):
        await waits
    assert process.asleep


@in_virtual_time
async def test_a_frozen_trainer_that_nobody_adopted_is_killed_when_another_needs_its_devices(world):
    process, _ = await left(world)
    process.frozen = True
    async with asyncio.timeout(1000), world.trainer("b").lease.use():
        assert process.died.done()


@in_virtual_time
async def test_a_trainer_that_is_busy_is_adopted_though_it_still_has_a_run_that_has_ended(world):
    process, a = await left(world)
    process.hosted = ("a", "ended")
    assert await a.host.adopt(a.run, on_exit=lambda _reason: None) is not None
    assert a.host.hosted == {"a"} and not process.died.done()


@in_virtual_time
async def test_a_trainer_that_is_adopted_within_a_use_is_called_with_its_lease(world):
    _, a = await left(world)
    async with a.lease.use() as token:
        await a.host.adopt(a.run, on_exit=lambda _reason: None)
        assert a.host.worker.lease == token


# --- The agent's launcher -------------------------------------------------------------------------


class Agents:
    """Stands for the stub: `stop` answers, or raises, what it is told to; each stream of exits ends
    with the connection, or as an agent ends that has stopped its workers."""

    def __init__(self) -> None:
        self.answer: agent_pb2.StopWorkerReply | grpc.StatusCode = agent_pb2.StopWorkerReply()
        self.streams: asyncio.Queue[Any] = asyncio.Queue()

    async def Stop(self, request, **_more):
        if isinstance(self.answer, grpc.StatusCode):
            raise broken(self.answer)
        return self.answer

    async def Watch(self, request, **_more):
        while True:
            match await self.streams.get():
                case "broke":
                    raise broken(grpc.StatusCode.UNAVAILABLE)
                case "ended":
                    return
                case running:
                    yield agent_pb2.WatchReply(running=running)


def broken(code: grpc.StatusCode) -> grpc.aio.AioRpcError:
    nothing = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(code, nothing, nothing, "it broke")


def launcher_of(agents: Agents, folder, *workers: str) -> AgentLauncher:
    epoch = Epoch(number=1, superseded=lambda: None)
    launcher = AgentLauncher(data_dir=folder, timeout=60, stop_timeout=10, epoch=epoch)
    vars(launcher)["_stub"] = agents
    for worker_id in workers:
        launcher._workers[worker_id] = agent_pb2.AgentWorker(worker_id=worker_id, kind="trainer")
    return launcher


@pytest.mark.parametrize(
    "answer",
    [
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.UNAVAILABLE,
        agent_pb2.StopWorkerReply(failure=WorkerMayRun("it is stuck").to_failure()),
    ],
    ids=["it is frozen", "it has ended", "it says so"],
)
def test_a_worker_is_not_gone_unless_its_agent_says_so(tmp_path, answer):
    async def scenario() -> None:
        agents = Agents()
        agents.answer = answer
        launcher = launcher_of(agents, tmp_path, "w")
        with pytest.raises(WorkerMayRun):
            await launcher.stop("w")
        agents.answer = agent_pb2.StopWorkerReply()
        await launcher.stop("w")

    run_in_virtual_time(scenario())


async def told(watch) -> str:
    """Return of which worker it is told that it ended."""
    async with asyncio.timeout(60):
        return (await anext(watch)).worker_id


async def nothing_is_told(watch) -> asyncio.Task[str]:
    waiting = asyncio.create_task(told(watch))
    await asyncio.sleep(50)
    assert not waiting.done()
    return waiting


def test_a_connection_that_broke_says_nothing_and_the_next_agent_what_is_left(tmp_path):
    async def scenario() -> None:
        agents = Agents()
        launcher = launcher_of(agents, tmp_path, "a", "b")
        watch = launcher.watch()
        agents.streams.put_nowait(["a", "b"])
        agents.streams.put_nowait("broke")
        waiting = await nothing_is_told(watch)
        assert not launcher.reports
        agents.streams.put_nowait(["b"])
        assert await waiting == "a"
        assert launcher.reports
        agents.streams.put_nowait("ended")
        assert await told(watch) == "b"
        await launcher.close(leaving=True)

    run_in_virtual_time(scenario())
