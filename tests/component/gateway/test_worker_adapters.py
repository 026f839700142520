"""The adapters of trainers and engines under a supervisor. Workers are gRPC servers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import pytest

from gateway.metrics import Metrics
from gateway.storage.database import Database
from gateway.workers.engine_adapter import EngineAdapter
from gateway.workers.epoch import Epoch
from gateway.workers.groups import EVERYTHING, WorkerGroup
from gateway.workers.job_adapter import JobAdapter
from gateway.workers.launchers.base import for_each_kind
from gateway.workers.overview import Budgets
from gateway.workers.processes import Processes
from gateway.workers.requests import WorkerRequest
from gateway.workers.roster import Roster
from gateway.workers.supervisor import Supervisor
from gateway.workers.table import WorkerRow, WorkerTable
from gateway.workers.trainer_adapter import TrainerAdapter
from tandem.errors import CannotSleep, WorkerStartFailed
from tandem.protocol.worker import WorkerHandle, WorkerSpec
from tandem.settings.gateway import GatewaySettings
from tandem.settings.sharing import SharingSettings
from tandem.v1 import common_pb2
from tests.support.gateway.fake_launcher import FakeLauncher, of_version
from tests.support.waiting import until

GPU = WorkerGroup(name="gpu", kinds=EVERYTHING, devices=("cuda:0", "cuda:1"))
SUSPENDING = replace(GPU, no_suspender="", device_bytes=8 * 2**30)
CORES = WorkerGroup(name="cpu", kinds=EVERYTHING, awake=0, on_host=True, most_ranks=2)


class LeavingLauncher(FakeLauncher):
    """A launcher whose processes outlive a gateway that leaves them."""

    async def list(self) -> list[WorkerHandle]:
        started = {spec.worker_id: spec for spec in self.specs}
        return [
            WorkerHandle.of(self.told[name], address=address)
            for name, address in self.addresses.items()
            if name in self._servers and name in started
        ]

    def __init__(self) -> None:
        super().__init__()
        self.addresses: dict[str, str] = {}
        self.told: dict[str, WorkerSpec] = {}

    async def start(self, spec: WorkerSpec) -> WorkerHandle:
        handle = await super().start(spec)
        self.addresses[spec.worker_id], self.told[spec.worker_id] = handle.address, spec
        return handle

    async def close(self) -> None:
        """Its workers stay for the next gateway, unless they were stopped."""


@dataclass(eq=False)
class Owner:
    """Describes the workers of a test. `woken` has the versions of an engine after its wakes."""

    woken: list[str] = field(default_factory=list)
    found: int = 0

    def specification(self, row: WorkerRow, group: WorkerGroup) -> WorkerSpec:
        return WorkerSpec(
            worker_id="",
            secret="",
            kind="sampler" if row.kind == "engine" else row.kind,
            session_id=row.session,
            run_id=row.key,
            model_name="tiny",
            model_path="tiny",
        )

    def wanted_version(self) -> common_pb2.WeightVersion | None:
        return common_pb2.WeightVersion(name="v1")

    def note_woken(self, version: str) -> None:
        self.woken.append(version)

    def note_found(self, about: object) -> None:
        self.found += 1


class Gateway:
    """A supervisor with all adapters, and the table of a database."""

    def __init__(
        self, folder, launcher: FakeLauncher, *, groups: Iterable[WorkerGroup], epoch: int = 1
    ) -> None:
        settings = GatewaySettings(
            data_dir=folder,
            worker_unresponsive_timeout=0.5,
            operation_timeout=10.0,
            sharing={"switch_timeout": 10.0},
        )
        self.database = Database(url="", data_dir=folder)
        self.processes = Processes(
            settings=settings,
            launchers=for_each_kind(launcher),
            metrics=Metrics(),
            epoch=Epoch(number=epoch, superseded=lambda: None),
        )
        self.trainers = TrainerAdapter(self.processes)
        self.engines = EngineAdapter(self.processes)
        self.jobs = JobAdapter(self.processes)
        self.adapters = {"trainer": self.trainers, "engine": self.engines, "job": self.jobs}
        self.owner = Owner()
        self.supervisor = Supervisor(
            Roster(
                table=WorkerTable(self.database),
                groups=groups,
                adapters=self.adapters,
                settings=SharingSettings(quantum=0.05),
                budgets=Budgets(silence=0.5),
                epoch=epoch,
                clock=time.time,
            )
        )

    async def open(self) -> None:
        await self.database.open()
        await self.processes.find_processes(self.supervisor)
        await self.supervisor.open()

    async def close(self, *, leaving: bool = False) -> None:
        await self.supervisor.close()
        await self.processes.close(leaving=leaving)
        await self.database.close()

    async def place(self, *names: str, kind: str = "trainer", **about: object) -> None:
        for name in names:
            request = WorkerRequest(key=name, kind=kind, owner="ann", session="s", **about)
            self.adapters[kind].register(name, self.owner)
            await self.supervisor.place([request], holder=name)

    def state(self, key: str) -> str:
        return self.supervisor.roster.rows[key].state

    async def worker_in_use(self, key: str):
        async with asyncio.timeout(20), self.supervisor.use(key) as row:
            return self.adapters[row.kind].require(row)


@pytest.fixture
def launcher():
    return LeavingLauncher()


@pytest.fixture
async def gateway(tmp_path, launcher):
    found = Gateway(tmp_path, launcher, groups=[GPU])
    await found.open()
    yield found
    await found.close()


async def restarted(before: Gateway, folder, launcher, *names: str) -> Gateway:
    """Return the next gateway, with descriptions of these trainers."""
    await before.close(leaving=True)
    after = Gateway(folder, launcher, groups=[GPU], epoch=2)
    for name in names:
        after.trainers.register(name, after.owner)
    await after.open()
    return after


async def test_a_worker_starts_with_its_devices_and_its_token(gateway, launcher):
    await gateway.place("a", ranks=2)
    worker = await gateway.worker_in_use("a")
    (spec,) = launcher.specs
    assert (spec.group, spec.devices) == ("gpu", ("cuda:0", "cuda:1"))
    row = gateway.supervisor.roster.rows["a"]
    assert spec.lease == worker.lease == row.token > 0
    assert spec.worker_id == row.process and spec.worker_id.startswith("trainer-s-")


async def test_a_worker_of_a_group_without_turns_has_no_token(tmp_path, launcher):
    gateway = Gateway(tmp_path, launcher, groups=[CORES])
    await gateway.open()
    await gateway.place("a")
    assert (await gateway.worker_in_use("a")).lease == 0
    await gateway.close()


async def test_workers_sleep_and_wake_in_turn_with_growing_tokens(gateway, launcher):
    await gateway.place("a", "b")
    a = await gateway.worker_in_use("a")
    first = a.lease
    await gateway.worker_in_use("b")
    assert launcher.servicers[a.worker_id].asleep
    again = await gateway.worker_in_use("a")
    assert again is a and a.lease > first
    assert launcher.servicers[a.worker_id].switches == ["sleep", "wake"]
    assert len(launcher.specs) == 2


async def test_a_host_suspends_a_trainer_that_cannot_sleep(gateway, launcher):
    await gateway.place("a", "b")
    a = await gateway.worker_in_use("a")
    launcher.servicers[a.worker_id].knows_how = False
    await gateway.worker_in_use("b")
    await gateway.worker_in_use("a")
    assert [(way, name) for way, name, _ in launcher.suspended] == [
        ("suspend", a.worker_id),
        ("resume", a.worker_id),
    ]


async def hold_in_turns(gateway: Gateway, key: str) -> None:
    """Use a worker as the life of a job does."""
    calls = gateway.supervisor.roster.calls_of(key)
    while True:
        async with gateway.supervisor.use(key):
            await until(lambda: calls.yielding)


@pytest.fixture
async def with_job(tmp_path, launcher):
    """A gateway whose host can suspend, with a running job `j`."""
    found = Gateway(tmp_path, launcher, groups=[SUSPENDING])
    await found.open()
    await found.place("j", kind="job")
    holding = asyncio.create_task(hold_in_turns(found, "j"))
    await until(lambda: found.state("j") == "awake")
    yield found
    holding.cancel()
    await asyncio.wait({holding})
    await found.close()


async def test_a_host_suspends_a_job_of_one_process_and_resumes_it(with_job, launcher):
    await with_job.place("b")
    for _ in range(2):
        await with_job.worker_in_use("b")
        assert with_job.state("j") == "asleep"
        await until(lambda: with_job.state("j") == "awake")
    moves, names, tokens = zip(*launcher.suspended, strict=True)
    assert moves == ("suspend", "resume") * 2
    assert set(names) == {with_job.supervisor.roster.rows["j"].process}
    assert sorted(set(tokens)) == list(tokens)
    assert not launcher.stopped


async def test_a_job_whose_program_loads_stays_awake_and_is_asked_again(
    with_job, launcher, monkeypatch
):
    monkeypatch.setattr("gateway.workers.step_runner.ASK_AGAIN_SECONDS", 0.2)
    refused = []

    async def suspend(name: str, **_about: object) -> None:
        refused.append(name)
        raise CannotSleep("no process of the job uses a GPU")

    with monkeypatch.context() as loading:
        loading.setattr(launcher, "suspend", suspend)
        await with_job.place("b")
        using = asyncio.create_task(with_job.worker_in_use("b"))
        await until(lambda: len(refused) > 1)
        said = "a worker of group gpu cannot be put to sleep: its program is loading"
        await until(lambda: said in with_job.supervisor.explain("b").reason)
    await using
    assert [move for move, _, _ in launcher.suspended] == ["suspend"]
    assert not launcher.stopped


async def test_a_job_that_cannot_be_suspended_ends_with_the_reason(with_job, launcher):
    launcher.suspend_error = "not supported"
    process, told = with_job.supervisor.roster.rows["j"].process, []
    with_job.supervisor.watch_ends("j", lambda *ended: told.append(ended))
    await with_job.place("b")
    await with_job.worker_in_use("b")
    assert told == [(process, "it did not sleep: not supported")]


async def test_the_next_gateway_resumes_no_job_where_nothing_can_be_suspended(tmp_path, launcher):
    before = Gateway(tmp_path, launcher, groups=[GPU])
    await before.open()
    await before.place("j", kind="job")
    process = (await before.worker_in_use("j")).worker_id
    await before.close(leaving=True)
    launcher.resume = None  # it would fail
    after = Gateway(tmp_path, launcher, groups=[GPU], epoch=2)
    await after.open()
    assert (await after.worker_in_use("j")).worker_id == process
    await after.close()


async def test_the_next_gateway_finds_a_suspended_job_asleep_and_it_wakes_in_turn(
    tmp_path, launcher
):
    before = Gateway(tmp_path, launcher, groups=[SUSPENDING])
    await before.open()
    await before.place("j", kind="job")
    holding = asyncio.create_task(hold_in_turns(before, "j"))
    await until(lambda: before.state("j") == "awake")
    await before.place("b")
    await before.worker_in_use("b")
    assert before.state("j") == "asleep"
    holding.cancel()
    process = before.supervisor.roster.rows["j"].process
    await before.close(leaving=True)
    after = Gateway(tmp_path, launcher, groups=[SUSPENDING], epoch=2)
    await after.open()
    await after.supervisor.await_found(["j", "b"])
    assert after.state("j") == "asleep"
    assert after.supervisor.overview().bytes["j"].host == SUSPENDING.device_bytes
    worker = await after.worker_in_use("j")
    assert worker.worker_id == process
    assert launcher.suspended[-1][0] == "resume"
    await after.close()


async def test_a_failed_start_reaches_the_caller(gateway, launcher):
    launcher.start_error["trainer"] = "the model cannot be read"
    await gateway.place("a")
    with pytest.raises(WorkerStartFailed, match="the model cannot be read"):
        await gateway.worker_in_use("a")
    assert not gateway.processes.list_records()


async def test_a_worker_that_crashes_while_it_starts_is_started_once_more(gateway, launcher):
    launcher.crashes = 1
    await gateway.place("a")
    await gateway.worker_in_use("a")
    first, second = launcher.specs
    assert first.worker_id != second.worker_id
    await gateway.place("b")
    launcher.crashes = 2
    with pytest.raises(WorkerStartFailed, match="SIGSEGV"):
        await gateway.worker_in_use("b")


async def test_a_worker_that_never_serves_is_killed_and_its_health_told(gateway, launcher):
    launcher.health.serving.clear()
    await gateway.place("a", start_timeout=0.5)
    said = r"not become ready \(its health was NOT_SERVING; it had 0.5 s to start\); its log is log"
    with pytest.raises(WorkerStartFailed, match=said):
        await gateway.worker_in_use("a")
    await until(lambda: launcher.stopped)


@pytest.mark.parametrize("crashed", [False, True])
async def test_a_worker_that_ends_while_it_loads_fails_its_start(gateway, launcher, crashed):
    launcher.health.serving.clear()
    await gateway.place("a")
    using = asyncio.create_task(gateway.worker_in_use("a"))
    (process,) = await until(lambda: launcher.serving)
    launcher.health.serving.set() if crashed else None
    await launcher.kill(process, "it was killed by SIGSEGV", crashed=crashed)
    if crashed:  # once
        await using
        assert len(launcher.specs) == 2
    else:
        with pytest.raises(WorkerStartFailed, match="trainer did not start: it was killed by"):
            await using


async def test_owners_hear_of_ends_and_the_next_use_starts_another_process(gateway, launcher):
    told = []
    await gateway.place("a")
    gateway.supervisor.watch_ends("a", lambda process, reason: told.append((process, reason)))
    a = await gateway.worker_in_use("a")
    await launcher.kill(a.worker_id, "it was killed by SIGKILL")
    await until(lambda: told)
    b = await gateway.worker_in_use("a")
    assert b is not a
    assert told == [(a.worker_id, "it was killed by SIGKILL")]


async def test_nothing_is_left_after_the_last_release(gateway, launcher):
    await gateway.place("a")
    a = await gateway.worker_in_use("a")
    await gateway.supervisor.release("a", holder="a")
    assert launcher.stopped == [a.worker_id]
    assert not gateway.supervisor.roster.rows and not gateway.processes.list_records()


async def test_a_silent_worker_is_killed_and_another_one_starts(gateway, launcher):
    await gateway.place("a")
    a = await gateway.worker_in_use("a")
    launcher.health.answering.clear()
    await until(lambda: a.worker_id in launcher.stopped)
    launcher.health.answering.set()
    assert await gateway.worker_in_use("a") is not a


async def test_a_worker_of_another_protocol_is_replaced(gateway, launcher):
    await gateway.place("a")
    launcher.health.about = of_version("0.0.1", protocol=99)
    a = await gateway.worker_in_use("a")
    await until(lambda: a.worker_id in launcher.stopped)
    launcher.health.about = of_version("0.0.1")
    assert (await gateway.worker_in_use("a")).worker_id != a.worker_id


# --- Restarts -------------------------------------------------------------------------------------


async def test_the_next_gateway_goes_on_with_an_awake_worker(gateway, launcher, tmp_path):
    await gateway.place("a")
    a = await gateway.worker_in_use("a")
    after = await restarted(gateway, tmp_path, launcher, "a")
    b = await after.worker_in_use("a")
    assert (b.worker_id, b.lease) == (a.worker_id, a.lease)
    assert len(launcher.specs) == 1
    await after.close()


async def test_the_next_gateway_wakes_a_sleeper(gateway, launcher, tmp_path):
    await gateway.place("a", "b")
    a = await gateway.worker_in_use("a")
    await gateway.worker_in_use("b")
    after = await restarted(gateway, tmp_path, launcher, "a", "b")
    woken = await after.worker_in_use("a")
    assert woken.worker_id == a.worker_id and not launcher.servicers[a.worker_id].asleep
    assert len(launcher.specs) == 2
    await after.close()


async def test_the_next_gateway_stops_processes_without_a_row(gateway, launcher, tmp_path):
    await gateway.place("a", "b")
    a = await gateway.worker_in_use("a")
    b = await gateway.worker_in_use("b")
    after = await restarted(gateway, tmp_path, launcher, "a", "b")
    await launcher.start(WorkerSpec(worker_id="trainer-x-1", kind="trainer", secret="x",
                                    model_name="m", model_path="m", session_id="x"))  # fmt: skip
    await after.processes.close(leaving=True)
    last = Gateway(tmp_path / "other", launcher, groups=[GPU], epoch=3)
    (tmp_path / "other").mkdir()
    await last.open()
    await last.supervisor.settle(())
    assert {a.worker_id, b.worker_id, "trainer-x-1"} <= set(launcher.stopped)
    await last.close()
    await after.supervisor.close()
    await after.database.close()


async def test_a_worker_that_ended_without_a_gateway_is_started_again(gateway, launcher, tmp_path):
    await gateway.place("a")
    a = await gateway.worker_in_use("a")
    await gateway.close(leaving=True)
    await launcher._end(a.worker_id)
    after = Gateway(tmp_path, launcher, groups=[GPU], epoch=2)
    after.trainers.register("a", after.owner)
    await after.open()
    assert (await after.worker_in_use("a")).worker_id != a.worker_id
    await after.close()


# --- Jobs -----------------------------------------------------------------------------------------


async def test_a_job_keeps_its_devices_until_it_ends(gateway, launcher):
    await gateway.place("j", kind="job")
    await gateway.place("a", priority=9)
    job = await gateway.worker_in_use("j")
    assert job.worker_id.startswith("job-s-")
    waiting = asyncio.create_task(gateway.worker_in_use("a"))
    await until(lambda: gateway.supervisor.explain("a"))
    await until(lambda: "the job j holds devices" in gateway.supervisor.explain("a").reason)
    assert [spec.worker_id for spec in launcher.specs] == [job.worker_id]
    await launcher.kill(job.worker_id, "the job exited with status 0")
    assert (await waiting).worker_id.startswith("trainer-s-")


async def test_the_end_of_a_job_counts_as_no_fault(gateway, launcher):
    told = []
    await gateway.place("j", kind="job")
    gateway.supervisor.watch_ends("j", lambda process, reason: told.append((process, reason)))
    job = await gateway.worker_in_use("j")
    await launcher.kill(job.worker_id, "the job exited with status 0")
    await until(lambda: told)
    assert told == [(job.worker_id, "the job exited with status 0")]
    assert gateway.supervisor.roster.rows["j"].state == "placed"
    counted = gateway.processes.metrics.registry.get_sample_value
    assert counted("tandem_gateway_worker_exits_total", {"kind": "job"}) is None


async def test_the_next_gateway_finds_a_running_job_awake(gateway, launcher, tmp_path):
    await gateway.place("j", kind="job")
    job = await gateway.worker_in_use("j")
    after = await restarted(gateway, tmp_path, launcher)
    assert (await after.worker_in_use("j")).worker_id == job.worker_id
    assert len(launcher.specs) == 1 and not launcher.stopped
    await after.supervisor.release("j", holder="j")
    assert launcher.stopped == [job.worker_id]
    await after.close()


# --- Engines --------------------------------------------------------------------------------------


async def test_an_engine_loads_the_wanted_version_when_it_wakes(gateway, launcher):
    await gateway.place("e", kind="engine", sampler="s1")
    await gateway.place("f", kind="engine", sampler="s2")
    e = await gateway.worker_in_use("e")
    assert e.worker_id.startswith("sampler-s-")
    await gateway.worker_in_use("f")
    assert launcher.servicers[e.worker_id].asleep
    await gateway.worker_in_use("e")
    assert not launcher.servicers[e.worker_id].asleep
    assert gateway.owner.woken == ["v1"]


async def test_the_next_gateway_hears_what_an_engine_has(gateway, launcher, tmp_path):
    await gateway.place("e", kind="engine", sampler="s1")
    e = await gateway.worker_in_use("e")
    await gateway.close(leaving=True)
    after = Gateway(tmp_path, launcher, groups=[GPU], epoch=2)
    after.engines.register("e", after.owner)
    await after.open()
    assert (await after.worker_in_use("e")).worker_id == e.worker_id
    assert after.owner.found == 1
    await after.close()
