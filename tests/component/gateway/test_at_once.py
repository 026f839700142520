"""Simultaneous requests, and requests while something ends."""

from __future__ import annotations

import asyncio
import itertools
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sqlalchemy import insert, select
from tinker import types
from typer.testing import CliRunner

from gateway.owners.auth.identity import Readers
from gateway.sampling.sessions import base_version
from gateway.storage.tables import models, runs, sampling_sessions
from tandem.cli.main import app
from tandem.errors import InternalError, SessionFinished, StorageFull
from tandem.protocol.worker import TrainingSpec, WorkerExit, WorkerHandle, WorkerSpec
from tests.support.files import entries
from tests.support.gateway.fake_launcher import FakeLauncher
from tests.support.gateway.fake_trainer import FakeTrainer
from tests.support.gateway.requests import asample, create_sampler, finish
from tests.support.gateway.running import make_model, running_gateway
from tests.support.waiting import PATIENCE, until, wait_until

NOBODY = Readers(())


@pytest.fixture
def gate(tmp_path):
    with running_gateway(tmp_path, session_ttl=600) as gate:
        yield gate


def creation(gate, session_id: str, number: int = 0, model: str = "tiny"):
    return gate.gateway.runs.create(
        session_id=session_id,
        model_seq_id=number,
        model=gate.gateway.models.get(model),
        training=TrainingSpec(),
        load=None,
        user_metadata=None,
        request=b"{}",
    )


def both(gate, first, second) -> list[object]:
    async def gathered() -> list[object]:
        return await asyncio.gather(first, second, return_exceptions=True)

    return gate.run(gathered())


def rows(gate, statement):
    return gate.run(gate.gateway.database.read(statement))


def test_a_run_that_is_asked_for_twice_at_once_is_one_run(gate, monkeypatch):
    session = gate.session_id()
    read_one, looked, looks = gate.gateway.database.read_one, asyncio.Barrier(2), itertools.count()

    async def both_look_first(statement):
        found = await read_one(statement)
        if next(looks) < 2:
            await looked.wait()
        return found

    monkeypatch.setattr(gate.gateway.database, "read_one", both_look_first)
    answers = both(gate, creation(gate, session), creation(gate, session))
    assert answers == [f"{session}:train:0:0"] * 2
    monkeypatch.undo()
    gate.retrieve(f"{session}:train:0:0")
    assert len([spec for spec in gate.launcher.specs if spec.kind == "trainer"]) == 1
    assert gate.gateway.runs.get(f"{session}:train:0").state == "ready"


def test_a_run_and_a_sampling_session_start_no_engine_before_something_samples(gate):
    session = gate.session_id()
    gate.retrieve(gate.run(creation(gate, session)))
    with gate.http() as client:
        sampler = create_sampler(client, session).json()["sampling_session_id"]
        assert [spec.kind for spec in gate.launcher.specs] == ["trainer"]
        assert gate.gateway.samplers.all() == []
        gate.retrieve(asample(client, sampler).json()["request_id"])
    assert [spec.kind for spec in gate.launcher.specs] == ["trainer", "sampler"]


def test_nothing_is_started_in_a_session_that_ended_meanwhile(gate):
    session = gate.session_id()
    gate.run(
        gate.gateway.end_session(session_id=session, state="finished", reason="success", detail="")
    )
    tiny = gate.gateway.models.get("tiny")
    with pytest.raises(SessionFinished):
        gate.run(creation(gate, session))
    with pytest.raises(SessionFinished):
        gate.run(lambda: gate.gateway.samplers.ensure(session_id=session, model=tiny, rank=0))
    with pytest.raises(SessionFinished):
        gate.run(
            gate.gateway.sampling.create(
                session_id=session, number=0, base_model="tiny", model_path=None, readers=NOBODY
            )
        )
    assert gate.launcher.specs == []
    assert gate.gateway.runs.all() == gate.gateway.samplers.all() == []
    assert gate.gateway.sampling.all() == []
    assert list(rows(gate, select(runs.c.id))) == list(rows(gate, select(sampling_sessions))) == []


def test_a_session_that_is_ended_twice_at_once_has_ended_for_both(gate):
    session = gate.session_id()
    gate.retrieve(gate.run(creation(gate, session)))

    async def end(reason: str) -> list[str]:
        await gate.gateway.end_session(
            session_id=session, state="finished", reason=reason, detail=""
        )
        return [run.id for run in gate.gateway.runs.all()]

    assert both(gate, end("success"), end("failure")) == [[], []], "both waited for the end"
    assert [worker.partition("-")[0] for worker in gate.launcher.stopped] == ["trainer"]


class StopsSlowly(FakeLauncher):
    def __init__(self) -> None:
        super().__init__()
        self.may_stop = asyncio.Event()
        self.events: list[str] = []

    async def stop(self, worker_id: str, *, at_once: bool = False) -> None:
        if worker_id.startswith("trainer"):
            self.events.append("the stop begins")
            await self.may_stop.wait()
            self.events.append("the trainer is stopped")
        await super().stop(worker_id)


def test_nothing_of_a_run_is_collected_until_its_trainer_is_stopped(tmp_path, monkeypatch):
    """The session ends while its failed run's trainer is being stopped."""
    with running_gateway(tmp_path, launcher=StopsSlowly(), session_ttl=600) as gate:
        session, launcher = gate.session_id(), gate.launcher
        run_id = gate.run_id(session)
        with gate.http() as client:  # starts an engine
            sampler = create_sampler(client, session).json()["sampling_session_id"]
            gate.retrieve(asample(client, sampler).json()["request_id"])
        collect = gate.gateway.collector.collect

        async def noted(of: str | None, *, ended: bool = False) -> bool:
            if ended:
                launcher.events.append("its files are collected")
            return await collect(of, ended=ended)

        monkeypatch.setattr(gate.gateway.collector, "collect", noted)
        run = gate.gateway.runs.get(run_id)
        gate.run(
            lambda: gate.gateway.runs.lifecycle.abort(run, InternalError("it answers no more"))
        )
        wait_until(lambda: launcher.events)

        async def end_session() -> None:
            ending = asyncio.create_task(
                gate.gateway.end_session(
                    session_id=session, state="finished", reason="success", detail=""
                )
            )
            await until(lambda: any(worker.startswith("sampler") for worker in launcher.stopped))
            assert not ending.done()
            launcher.may_stop.set()
            await ending

        gate.run(end_session())
        first, second, *others = launcher.events
        assert (first, second) == ("the stop begins", "the trainer is stopped")
        assert set(others) == {"its files are collected"}


def test_whoever_ends_a_session_does_not_wait_for_ever_for_a_trainer_that_keeps_its_place(tmp_path):
    with running_gateway(
        tmp_path, launcher=StopsSlowly(), session_ttl=600, worker_stop_timeout=0.1
    ) as gate:
        session = gate.session_id()
        run_id = gate.run_id(session)
        gate.run(
            gate.gateway.end_session(
                session_id=session, state="finished", reason="success", detail=""
            )
        )
        wait_until(lambda: gate.launcher.events == ["the stop begins"])
        rows = gate.gateway.supervisor.roster.rows
        assert run_id in rows
        gate.run(gate.launcher.may_stop.set)
        wait_until(lambda: run_id not in rows)


def test_a_session_whose_end_cannot_be_written_ends_all_the_same(gate, monkeypatch):
    session = gate.session_id()
    gate.retrieve(gate.run(creation(gate, session)))

    async def full(**_named: object) -> bool:
        gate.gateway.sessions._active.pop(session)
        raise StorageFull("the disk is full")

    monkeypatch.setattr(gate.gateway.sessions, "end", full)
    with pytest.raises(StorageFull):
        gate.run(
            gate.gateway.end_session(
                session_id=session, state="finished", reason="success", detail=""
            )
        )
    assert len(gate.launcher.stopped) == 1
    assert gate.gateway.runs.all() == gate.gateway.samplers.all() == []


def test_the_second_of_two_equal_requests_is_taken_when_the_first_cannot_be_written(
    gate, monkeypatch
):
    run_id = gate.run_id(gate.session_id())
    accept, calls, second_is_sent = gate.gateway.journal.accept, [], asyncio.Event()

    async def full_at_first(operation, **named):
        calls.append(operation.seq_id)
        if len(calls) == 1:
            await second_is_sent.wait()
            raise StorageFull("the payload could not be written")
        return await accept(operation, **named)

    monkeypatch.setattr(gate.gateway.journal, "accept", full_at_first)

    async def submit(*, second: bool = False) -> str:
        if second:
            second_is_sent.set()
        return await gate.gateway.admission.submit(
            run_id=run_id, seq_id=1, kind="optim_step", refused=StorageFull("as an outcome")
        )

    first, second = both(gate, submit(), submit(second=True))
    assert isinstance(first, StorageFull)
    assert second == f"{run_id}:1"
    assert gate.retrieve(second).json()["error"] == "storage_full: as an outcome"


class DiesWhenReady(FakeLauncher):
    def __init__(self) -> None:
        super().__init__()
        self.died = False
        self.heard = asyncio.Event()

    async def start(self, spec: WorkerSpec) -> WorkerHandle:
        handle = await super().start(spec)
        if spec.kind == "sampler" and not self.died:
            self.died = True
            await self.kill(spec.worker_id, "it was killed by SIGSEGV", crashed=True)
            await self.heard.wait()
        return handle

    async def watch(self) -> AsyncIterator[WorkerExit]:
        async for exit_ in super().watch():
            yield exit_
            self.heard.set()  # the supervisor knows of its end and starts the next


def test_whoever_waits_for_an_engine_that_dies_at_once_is_answered_by_the_next(tmp_path):
    with running_gateway(tmp_path, launcher=DiesWhenReady(), session_ttl=600) as gate:
        gate.run(gate.launcher.start_gate.clear)
        with gate.service() as service:
            sampling = service.create_sampling_client(base_model="tiny").result()
            answer = sampling.sample(
                types.ModelInput.from_ints([1, 2, 3]), 1, types.SamplingParams(max_tokens=3)
            )
            wait_until(lambda: any(sampler.waiting for sampler in gate.gateway.samplers.all()))
            gate.run(gate.launcher.start_gate.set)
            assert answer.result(timeout=PATIENCE).sequences[0].tokens == [3, 2, 1]
        assert gate.launcher.died


def test_every_load_asks_the_engine_whatever_was_loaded_before(tmp_path):
    with running_gateway(tmp_path, session_ttl=600) as gate:
        session, tiny = gate.session_id(), gate.gateway.models.get("tiny")
        sampler = gate.run(
            lambda: gate.gateway.samplers.ensure(session_id=session, model=tiny, rank=8)
        )
        few = {"max_adapters": 1}
        sampler.engine.settings = sampler.engine.settings.model_copy(update=few)
        base = base_version(tiny)
        names = ["run/v000001-aaaaaaaa", "run/v000002-bbbbbbbb", "run/v000001-aaaaaaaa"]
        for name in names:
            adapter = type(base)(
                name=name, path=name, run_id="run", step=0, base_model="tiny", adapter=True
            )
            gate.run(sampler.load(adapter))
        assert gate.worker("sampler")[1].loaded == names
        assert sampler.engine.loaded == {"base/tiny", names[0]}


def test_a_value_that_the_database_cannot_take_fails_its_own_write_alone(gate):
    database = gate.gateway.database
    odd, other = (
        insert(models).values(name=name, path="p", max_length=length, added_at=0.0)
        for name, length in (("odd", 2**70), ("good", 1))
    )
    failed, done = both(gate, database.write(odd), database.write(other))
    assert isinstance(failed, OverflowError)
    assert done is None
    names = {row["name"] for row in rows(gate, select(models.c.name))}
    assert names >= {"good", "tiny"} and "odd" not in names


def test_a_sampling_session_whose_session_ended_in_a_crash_does_not_come_back(tmp_path):
    with running_gateway(tmp_path, session_ttl=600) as gate:
        session = gate.session_id()
        create = gate.gateway.sampling.create
        gate.run(
            create(session_id=session, number=0, base_model="tiny", model_path=None, readers=NOBODY)
        )
        path = Path(gate.settings.data_dir) / "tandem.db"
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE sessions SET state = 'finished'")
    with running_gateway(tmp_path, session_ttl=600) as gate:
        assert gate.gateway.sampling.all() == []
        states = [row["state"] for row in rows(gate, select(sampling_sessions.c.state))]
        assert states == ["ended"]


# --- A start after a base model was removed -----------------------------------------------


def sampling_sessions_of(gate) -> dict[str, str]:
    chosen = select(sampling_sessions.c.base_model, sampling_sessions.c.state)
    return {row["base_model"]: row["state"] for row in rows(gate, chosen)}


def sample_from_two_models_and_remove_one(tmp_path) -> str:
    """The id of an active session that samples from both models."""
    with running_gateway(tmp_path, session_ttl=600) as gate, gate.http() as client:
        path = str(make_model(tmp_path / "gone"))
        gate.run(gate.gateway.models.add(name="gone/model", path=path))
        session = gate.session_id()
        for number, model in enumerate(("gone/model", "tiny")):
            assert create_sampler(client, session, number, model=model).is_success
        command = ["models", "remove", "gone/model", "--data-dir", str(gate.settings.data_dir)]
        removed = CliRunner().invoke(app, command)
        assert removed.stdout == "gone/model is no longer registered.\n"
        assert [model.name for model in gate.gateway.models.all()] == ["tiny"]
    return session


def test_a_start_ends_the_sampling_session_of_a_removed_model_alone_and_says_so(tmp_path, capfd):
    session = sample_from_two_models_and_remove_one(tmp_path)
    with running_gateway(tmp_path, session_ttl=600) as gate, gate.http() as client:
        assert sampling_sessions_of(gate) == {"gone/model": "ended", "tiny": "active"}
        assert [active.id for active in gate.gateway.sessions.all()] == [session]
        gone = asample(client, f"{session}:sample:0")
        assert (gone.status_code, gone.json()["type"]) == (404, "unknown_sampler")
        assert "its model or weights were removed" in gone.json()["error"]
        assert gate.retrieve(asample(client, f"{session}:sample:1").json()["request_id"]).is_success
    log = capfd.readouterr()
    (line,) = [
        line for line in (log.out + log.err).splitlines() if "sampling_session_not_restored" in line
    ]
    assert "unknown model 'gone/model'" in line
    assert f"{session}:sample:0" in line


def test_a_model_of_the_settings_is_there_before_the_sessions_that_sample_from_it(tmp_path):
    sample_from_two_models_and_remove_one(tmp_path)
    named = {"gone/model": tmp_path / "gone"}
    with running_gateway(tmp_path, session_ttl=600, models=named) as gate:
        assert sampling_sessions_of(gate) == {"gone/model": "active", "tiny": "active"}


class EndsBeforeItAnswers(FakeTrainer):
    """Its saves are complete, but unanswered, when the session ends."""

    async def Publish(self, request, context):
        await super().Publish(request, context)
        await asyncio.Event().wait()

    async def SaveCheckpoint(self, request, context):
        await super().SaveCheckpoint(request, context)
        await asyncio.Event().wait()


@pytest.mark.parametrize("route", ["save_weights", "save_weights_for_sampler"])
def test_a_save_that_its_client_was_never_told_of_goes_with_the_session(tmp_path, route):
    launcher = FakeLauncher(trainer=EndsBeforeItAnswers)
    with running_gateway(tmp_path, launcher=launcher, session_ttl=600) as gate:
        session = gate.session_id()
        run_id = gate.run_id(session)
        data = gate.settings.data_dir
        root = data / ("checkpoints" if route == "save_weights" else "weights")
        folder = root / run_id.replace(":", "_")

        def complete() -> list[str]:
            return [entry.name for entry in entries(folder) if not entry.name.startswith(".")]

        with gate.http() as client:
            body = {"model_id": run_id, "seq_id": 1, "path": "final"}
            client.post(f"/api/v1/{route}", json=body)
            wait_until(complete)
            assert finish(client, session).is_success
        assert entries(folder) == []
