"""What is metered, added up by hour, and reported."""

from __future__ import annotations

import pytest

from gateway.auth.identity import Caller
from gateway.limits import Quotas
from gateway.metrics import Metrics
from gateway.sessions.registry import NewSession, SessionRegistry
from gateway.storage.database import Database
from gateway.usage.meter import Subject, TimeShares, UsageMeter
from gateway.usage.reports import BillingReports
from tandem.settings import LimitSettings

ADMIN = Caller(owner="local", key_id="k-1", role="admin")


def test_shares_of_a_clock_add_up_to_the_time_in_which_there_was_work():
    now = [0.0]
    clock = TimeShares(lambda: now[0])
    now[0] = 5.0  # nothing is under way
    first = clock.start()
    now[0] = 6.0
    second = clock.start()
    now[0] = 10.0
    assert clock.stop(first) == pytest.approx(1 + 4 / 2)
    now[0] = 13.0
    assert clock.stop(second) == pytest.approx(4 / 2 + 3)
    now[0] = 20.0
    third = clock.start()
    assert clock.stop(third) == 0


@pytest.fixture
async def database(tmp_path):
    database = Database(url="", data_dir=tmp_path)
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
    for _ in range(2):  # the second is that of the next gateway
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
