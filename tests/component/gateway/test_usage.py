"""What was used, added up by hour and told by the billing calls, through the SDK."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
import tinker
from tinker import types

from gateway.auth.identity import Caller
from gateway.sessions.registry import NewSession, SessionRegistry
from gateway.storage.database import Database
from gateway.usage.meter import Subject, UsageMeter
from gateway.usage.reports import BillingReports
from gateway.usage.samples import TimeShares
from tests.support.gateway.running import KEY, datum, no_counts, running_gateway

ADMIN = Caller(owner="local", key_id="k-1", role="admin")
HOUR = timedelta(hours=1)


@pytest.fixture(scope="module")
def gate(tmp_path_factory):
    with running_gateway(tmp_path_factory.mktemp("usage"), session_ttl=600) as gate:
        yield gate


@pytest.fixture
def admin(gate):
    return tinker.AdminClient(base_url=gate.url, api_key=KEY)


def window() -> tuple[datetime, datetime]:
    start = datetime.now(UTC).replace(minute=0, second=0, microsecond=0) - HOUR
    return start, start + 3 * HOUR


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
    database = Database.at(url="", data_dir=tmp_path)
    await database.open()
    yield database
    await database.close()


async def test_usage_is_added_up_by_hour_over_writes_and_restarts(database):
    sessions = SessionRegistry(database=database, limits=no_counts(), ttl=60)
    session = await sessions.create(
        NewSession(owner="local", project_id="p", user_metadata={"a": "b"})
    )
    now = [7200.0]
    subject = Subject(id=f"{session.id}:train:0", session_id=session.id, base_model="tiny")
    for _ in range(2):  # the second is that of the next gateway
        usage = UsageMeter(database=database, sessions=sessions, clock=lambda: now[0])
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
    sessions = SessionRegistry(database=database, limits=no_counts(), ttl=60)
    usage = UsageMeter(database=database, sessions=sessions, clock=lambda: 3600.0)
    for number in range(5000):
        subject = Subject(id=f"s-1:sample:{number}", session_id="s-1", base_model="tiny")
        usage.record("sample", subject, input_tokens=2, cached_tokens=1, output_tokens=3)
    assert len(usage._sums) < 5000
    reports = BillingReports(database=database, usage=usage)
    report = await reports.events(ADMIN, starting_on=3600, ending_before=7200)
    assert [(e.type, e.quantity) for e in report.events] == [
        ("sampling_sample", 15000),
        ("sampling_prefill", 5000),
        ("sampling_prefill_cached", 5000),
    ]


def test_billing_counts_exactly_what_was_trained_and_sampled(gate, admin):
    with tinker.ServiceClient(
        base_url=gate.url, api_key=KEY, project_id="paid", user_metadata={"who": "me"}
    ) as service:
        session_id = service.holder.get_session_id()
        training = service.create_lora_training_client("tiny:full").result()
        training.forward([datum([1, 2, 3])], "cross_entropy").result()
        training.forward_backward([datum([1, 2]), datum([3, 4, 5])], "cross_entropy").result()
        training.optim_step(types.AdamParams()).result()
        training.save_state("kept").result()
        sampler = training.save_weights_and_get_sampling_client()
        params = types.SamplingParams(max_tokens=3)
        sampler.sample(types.ModelInput.from_ints([1, 2, 3, 4]), 2, params).result()

        usage = admin.get_billing_usage(*window()).result()
        mine = [event for event in usage.data if event.session_id == session_id]
        told = {
            (e.event_info.type, getattr(e.event_info, "cached", None)): getattr(
                e.event_info, "token_count", None
            )
            for e in mine
        }
        assert told == {
            ("training", None): 3 + 5,
            ("sampling_prefill", False): 3,
            ("sampling_prefill", True): 1,
            ("sampling_sample", None): 8,
            ("checkpoint", None): None,
        }
        (saved,) = [e.event_info for e in mine if e.event_info.type == "checkpoint"]
        assert saved.count == 1, "an ephemeral publish leaves no checkpoint"
        for event in mine:
            assert (event.base_model, event.project_id) == ("tiny", "paid")
            assert event.bucket_end - event.bucket_start == HOUR
            assert event.user_id == "tml:organization_user:local"
            assert event.estimated_cost_usd is None
        assert usage.sessions[session_id].user_metadata == {"who": "me"}
        with gate.http() as client:
            start, end = (time.isoformat().replace("+00:00", "Z") for time in window())
            query = {"starting_on": start, "ending_before": end, "session_id": session_id}
            answer = client.get("/api/v1/billing/usage/events", params=query).json()
        seconds = {e["event_info"]["type"]: e["accelerator_seconds"] for e in answer["data"]}
        assert seconds["training"] == pytest.approx(0.5 + 0.5 + 0.25)
        assert seconds["sampling_sample"] > 0

        rest = tinker.RestClient(base_url=gate.url, api_key=KEY)
        rest.assign_session_project(session_id, "moved").result()
        usage = rest.get_billing_usage(*window()).result()
        projects = {e.project_id for e in usage.data if e.session_id == session_id}
        assert projects == {"moved"}


def test_a_window_that_makes_no_sense_is_refused(admin):
    now = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    for start, end, why in (
        (now.replace(minute=30), now + HOUR, "on the hour"),
        (now, now, "before"),
        (now + HOUR, now, "before"),
        (now - timedelta(days=15), now, "14 days"),
        (now + 2 * HOUR, now + 3 * HOUR, "future"),
    ):
        with pytest.raises(tinker.BadRequestError, match=why):
            admin.get_billing_usage(start, end).result()
    assert admin.get_billing_usage(now - timedelta(days=14), now).result().data is not None


def test_storage_is_that_of_the_checkpoints_that_there_are(gate, admin):
    with tinker.ServiceClient(base_url=gate.url, api_key=KEY, project_id="stored") as service:
        training = service.create_lora_training_client("tiny:full").result()
        assert admin.get_current_checkpoint_storage_usage("stored").result().data == []
        path = training.save_state("one").result().path
        training.save_state("two").result()
        (item,) = admin.get_current_checkpoint_storage_usage("stored").result().data
        assert (item.project_id, item.org_user_urn) == ("stored", "tml:organization_user:local")
        assert (item.checkpoint_count, item.size_bytes) == (2, 42)
        assert item.size_gigabytes == pytest.approx(42e-9)
        assert item.estimated_monthly_cost_usd is None
        everything = admin.get_current_checkpoint_storage_usage().result()
        assert sum(i.checkpoint_count for i in everything.data) >= 2
        tinker.RestClient(base_url=gate.url, api_key=KEY).delete_checkpoint_from_tinker_path(
            path
        ).result()
        (item,) = admin.get_current_checkpoint_storage_usage("stored").result().data
        assert (item.checkpoint_count, item.size_bytes) == (1, 21)
