from __future__ import annotations

import pytest
from sqlalchemy import insert

from gateway.metrics import Metrics
from gateway.owners.auth.identity import Caller
from gateway.owners.limits import Quotas
from gateway.owners.sessions.registry import NewSession, SessionRegistry
from gateway.owners.usage.meter import Subject, TimeShares, UsageMeter
from gateway.owners.usage.reports import BillingReports, OwnerUsage
from gateway.storage.database import Database
from gateway.storage.tables import checkpoints, runs, worker_events
from tandem.settings.requests import LimitSettings
from tests.support.postgres import url_for

pytestmark = pytest.mark.usefixtures("each_database")

ADMIN = Caller(owner="local", key_id="k-1", role="admin")


def test_shares_of_a_clock_add_up_to_the_time_in_which_there_was_work():
    now = [0.0]
    clock = TimeShares(lambda: now[0])
    now[0] = 5.0  # no operation runs
    first = clock.begin_task()
    now[0] = 6.0
    second = clock.begin_task()
    now[0] = 10.0
    assert clock.end_task(first) == pytest.approx(1 + 4 / 2)
    now[0] = 13.0
    assert clock.end_task(second) == pytest.approx(4 / 2 + 3)
    now[0] = 20.0
    third = clock.begin_task()
    assert clock.end_task(third) == 0


@pytest.fixture
async def database(tmp_path):
    database = Database(url=url_for(tmp_path), data_dir=tmp_path)
    await database.open()
    yield database
    await database.close()


async def test_usage_is_added_up_by_hour_over_writes_and_restarts(database):
    sessions = SessionRegistry(
        database=database, limits=Quotas(settings=LimitSettings(), metrics=Metrics()), ttl=60
    )
    session = await sessions.create(
        NewSession(owner="local", project_id="p", user_metadata={"a": "b"})
    )
    now = [7200.0]
    subject = Subject(
        id=f"{session.id}:train:0", session_id=session.id, owner="local", base_model="tiny"
    )
    for _ in range(2):  # the second is the next gateway's
        usage = UsageMeter(database=database, clock=lambda: now[0])
        usage.record("forward", subject, input_tokens=5, accelerator_seconds=0.5)
        usage.write()
        usage.record("forward_backward", subject, input_tokens=10, accelerator_seconds=1.0)
        usage.record("optim_step", subject, accelerator_seconds=2.0)
        usage.write()
        usage.write()
    now[0] = 3 * 3600.0
    usage.record("save_weights", subject, accelerator_seconds=0.25)
    usage.record("publish", subject, accelerator_seconds=0.5)
    reports = BillingReports(database=database, usage=usage)
    report = await reports.events(ADMIN, starting_on=7200, ending_before=4 * 3600)
    told = [(e.hour, e.type, e.quantity, e.accelerator_seconds) for e in report.events]
    assert told == [
        (7200, "training", 30, 7.0),
        (10800, "checkpoint", 1, 0.25),
        (10800, "training", 0, 0.5),
    ]
    assert {(e.project_id, e.owner, e.base_model) for e in report.events} == {
        ("p", "local", "tiny")
    }
    assert report.metadata == {session.id: {"a": "b"}}
    await sessions.assign_project(session_id=session.id, project_id="q")
    moved = await reports.events(ADMIN, starting_on=0, ending_before=9 * 3600, project_id="q")
    assert len(moved.events) == 3
    others = Caller(owner="somebody", key_id="k-2", role="member")
    assert not (await reports.events(others, starting_on=0, ending_before=9 * 3600)).events


async def test_however_many_subjects_there_are_memory_stays_bounded(database):
    usage = UsageMeter(database=database, clock=lambda: 3600.0)
    for number in range(5000):
        subject = Subject(
            id=f"s-1:sample:{number}", session_id="s-1", owner="local", base_model="tiny"
        )
        usage.record("sample", subject, input_tokens=2, cached_tokens=1, output_tokens=3)
    assert len(usage._sums) < 5000
    reports = BillingReports(database=database, usage=usage)
    report = await reports.events(ADMIN, starting_on=3600, ending_before=7200)
    assert [(e.type, e.quantity) for e in report.events] == [
        ("sampling_sample", 15000),
        ("sampling_prefill", 5000),
        ("sampling_prefill_cached", 5000),
    ]


def checkpoint(run_id: str, *, owner: str, size: int, **more) -> dict[str, object]:
    return {
        "path": f"tinker://{run_id}/weights/{size}",
        "run_id": run_id,
        "kind": "weights",
        "base_model": "tiny",
        "step": 1,
        "bytes": size,
        "optimizer": True,
        "owner": owner,
        "created_at": 0.0,
        **more,
    }


async def test_usage_is_summed_up_by_owner_and_by_run_and_samples_count_for_their_run(database):
    now = [36_000.0]
    usage = UsageMeter(database=database, clock=lambda: now[0])
    reports = BillingReports(database=database, usage=usage)

    def subject(id_: str, run_id: str, owner: str = "ann") -> Subject:
        return Subject(id=id_, session_id="s-1", owner=owner, base_model="tiny", run_id=run_id)

    run = "s-1:train:0"
    usage.record("forward_backward", subject(run, run), input_tokens=100, accelerator_seconds=2.0)
    usage.record("optim_step", subject(run, run), accelerator_seconds=1.0)
    tokens = {"input_tokens": 10, "cached_tokens": 4, "output_tokens": 7}
    usage.record("sample", subject("s-1:sample:0", run), **tokens, accelerator_seconds=0.5)
    usage.record("sample", subject("s-2:sample:0", run, "ben"), **tokens, accelerator_seconds=0.25)
    usage.record("sample", subject("s-1:sample:1", ""), **tokens, accelerator_seconds=8.0)
    named = {"id": run, "session_id": "s-1", "base_model": "tiny", "training": {}, "name": "mine"}
    await database.write(insert(runs), named | {"owner": "ann", "state": "ended", "created_at": 0})
    await database.write(insert(checkpoints), checkpoint(run, owner="ann", size=1000))
    expired = checkpoint(run, owner="ann", size=5000, expires_at=1.0)
    await database.write(insert(checkpoints), expired)
    old = checkpoint("s-0:train:0", owner="ann", size=300)
    await database.write(insert(checkpoints), old)

    def about(used: OwnerUsage) -> tuple[object, ...]:
        return (
            *(used.training_tokens, used.prompt_tokens, used.cached_tokens, used.sampled_tokens),
            *(used.accelerator_seconds, used.checkpoints, used.checkpoint_bytes),
        )

    found = await reports.summary(ADMIN, since=0, max_runs=10)
    assert {used.owner: about(used) for used in found.owners} == {
        "ann": (100, 20, 8, 14, 11.5, 2, 1300),
        "ben": (0, 10, 4, 7, 0.25, 0, 0),
    }
    assert [(used.run_id, used.owner, used.base_model, *about(used)) for used in found.runs] == [
        (run, "ann", "tiny", 100, 10, 4, 7, 3.5, 1, 1000),
        (run, "ben", "tiny", 0, 10, 4, 7, 0.25, 0, 0),
        ("s-0:train:0", "ann", "tiny", 0, 0, 0, 0, 0.0, 1, 300),
    ]
    assert [used.name for used in found.runs] == ["mine", "mine", ""]
    assert len((await reports.summary(ADMIN, since=0, max_runs=1)).runs) == 1
    ben = Caller(owner="ben", key_id="k-2", role="member")
    found = await reports.summary(ben, since=0, max_runs=9)
    assert [used.owner for used in (*found.owners, *found.runs)] == ["ben", "ben"]
    assert found.runs[0].name == "", "the run is ann's"
    later = await reports.summary(ADMIN, since=40_000, max_runs=9)
    assert [about(used)[4:] for used in later.runs] == [(0.0, 1, 1000), (0.0, 1, 300)]


async def test_work_is_summed_by_owner_and_blueprint_in_the_database(database, monkeypatch):
    """A session has the blueprint of its tagged run. The answer reads one row for each sum."""
    usage = UsageMeter(database=database, clock=lambda: 7200.0)
    tags = {"s-1": ["x", 'blueprint:süß, "a"'], "s-2": None, "s-3": ["blueprint"]}
    tags["s-4"] = ["blueprint:a\0b"]
    for owner in ("ann", "ben"):
        for name, given in tags.items():
            session = f"{owner}-{name}"
            for number in range(2):
                run = f"{session}:train:{number}"
                row = {
                    "id": run,
                    "session_id": session,
                    "base_model": "tiny",
                    "training": {},
                    "owner": owner,
                    "state": "ended",
                    "tags": None if number else given,
                    "created_at": 7300.0 if number else 100.0,
                }
                await database.write(insert(runs), row)
                subject = Subject(
                    id=run, run_id=run, session_id=session, owner=owner, base_model="tiny"
                )
                usage.record("forward", subject, input_tokens=5, accelerator_seconds=0.5)
            at = [("waiting", 7210.0), ("awake", 7213.0)]
            events = [
                {"at": when, "key": session, "kind": "trainer", "owner": owner}
                | {"session_id": session, "state": state}
                for state, when in at
            ]
            await database.write(insert(worker_events), *events)
    reports, read = BillingReports(database=database, usage=usage), [0]

    async def counted(statement):
        rows = await Database.read(database, statement)
        read[0] += len(rows)
        return rows

    monkeypatch.setattr(database, "read", counted)
    found = await reports.by_blueprint(ADMIN, since=7200.0)
    whole = [("", 6, 9.0, 3.0), ('süß, "a"', 2, 3.0, 1.0)]
    assert [tuple(vars(each).values()) for each in found.blueprints] == [
        (owner, *sums) for owner in ("ann", "ben") for sums in whole
    ]
    assert read[0] == 4
    member = Caller(owner="ben", key_id="k-2", role="member")
    found = await reports.by_blueprint(member, since=7212.0)
    assert [tuple(vars(each).values()) for each in found.blueprints] == [
        ("ben", "", 6, 3.0, 3.0),
        ("ben", 'süß, "a"', 2, 1.0, 1.0),
    ]
