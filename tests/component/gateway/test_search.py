"""Sessions and runs are listed, searched, described and moved."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime, timedelta, timezone

import pytest
import tinker
from sqlalchemy import delete, select
from tinker import types

from gateway.storage.tables import sessions
from tests.support.gateway.requests import finish
from tests.support.gateway.running import KEY
from tests.support.sdk import supervised


@pytest.fixture
def mark() -> str:
    """A mark of this test's sessions."""
    return uuid.uuid4().hex[:8]


def service_of(gate, **about) -> tinker.ServiceClient:
    return tinker.ServiceClient(base_url=gate.url, api_key=KEY, **about)


def session_of(service) -> str:
    return service.holder.get_session_id()


def new_run(service) -> tinker.TrainingClient:
    return service.create_lora_training_client("tiny:full").result()


def found(rest, **filters) -> list[str]:
    request = types.SessionSearchRequest(**filters)
    return [s.session_id for s in rest.search_sessions(request).result().sessions]


def test_a_session_is_described_with_its_runs_and_samplers_in_order(gate, rest):
    with service_of(gate, user_metadata={"a": "1"}, display_name="My name") as service:
        first = service.create_lora_training_client("tiny:full").result()
        second = service.create_lora_training_client("tiny:full").result()
        sampler = service.create_sampling_client(base_model="tiny").result()
        session = rest.get_session(session_of(service)).result()
        assert session.training_run_ids == [first.model_id, second.model_id]
        assert session.sampler_ids == [sampler._sampling_session_id]
        assert session.user_metadata == {"a": "1"}
        assert session.display_name == "My name"
    with pytest.raises(tinker.NotFoundError):
        rest.get_session("s-000000000000").result()


def test_what_a_client_says_of_its_session_is_kept(gate, monkeypatch):
    monkeypatch.setenv("TINKER_TAGS", "night,big")
    with service_of(gate, project_id="p-kept") as service:
        row = gate.run(
            gate.gateway.database.read_one(
                select(sessions).where(sessions.c.id == session_of(service))
            )
        )
    assert sorted(row["tags"]) == ["big", "night"]
    assert row["project_id"] == "p-kept"
    assert row["sdk_version"] == tinker.__version__
    assert row["owner"] == "local"


def test_sessions_are_listed_newest_first_in_pages(gate, rest):
    made = []
    for _ in range(3):
        made.append(gate.session_id())
    newest_first = made[::-1]
    assert rest.list_sessions(limit=3).result().sessions == newest_first
    assert rest.list_sessions(limit=2, offset=1).result().sessions == newest_first[1:]
    assert rest.list_sessions(limit=3, access_scope="accessible").result().sessions == newest_first
    for wrong in ({"limit": -1}, {"limit": 1001}, {"offset": -1}, {"access_scope": "all"}):
        with pytest.raises(tinker.BadRequestError):
            rest.list_sessions(**wrong).result()


def test_each_filter_of_a_search_finds_what_it_says(gate, rest, mark):
    services = [
        service_of(
            gate,
            project_id=f"project-{mark}" if number else None,
            display_name=f"Nightly ÄPFEL {mark} n{number}",
            user_metadata={"mark": mark, "number": str(number)},
        )
        for number in range(3)
    ]
    ids = [session_of(service) for service in services]
    services[1].close("errored", detail="it broke").result()
    services[2].close("success").result()
    by = {"user_metadata": {"mark": mark}}

    assert found(rest, session_id=ids[1]) == [ids[1]]
    assert found(rest, session_id="s-nothing") == []
    assert found(rest, display_name=f"äpfel {mark}") == ids[::-1]
    assert found(rest, display_name=f"{mark} n2 nightly") == [ids[2]]
    assert found(rest, session_id=ids[0], display_name=f"{mark} n2") == [ids[2], ids[0]]
    assert found(rest, **by) == ids[::-1]
    assert found(rest, user_metadata={"mark": mark, "number": "1"}) == [ids[1]]
    assert found(rest, user_metadata={"mark": mark, "none": ""}) == []
    assert found(rest, project_ids=[f"project-{mark}"]) == [ids[2], ids[1]]
    assert found(rest, project_ids=[]) == []
    assert found(rest, **by, owner=types.AccessibleSearchOwner()) == ids[::-1]
    me = rest.whoami().result().user_urn
    assert found(rest, **by, owner=types.UserSearchOwner(owner_urns=["x", me])) == ids[::-1]
    assert found(rest, **by, owner=types.UserSearchOwner(owner_urns=["x"])) == []
    status = {
        "active": types.ActiveSessionStatusQuery(),
        "any_end": types.ClientFinishedSessionStatusQuery(),
        "errored": types.ClientFinishedSessionStatusQuery(reasons=["errored"]),
        "failed": types.FailedSessionStatusQuery(),
        "cancelled": types.CancelledSessionStatusQuery(),
    }
    assert found(rest, **by, statuses=[status["active"]]) == [ids[0]]
    assert found(rest, **by, statuses=[status["any_end"]]) == [ids[2], ids[1]]
    assert found(rest, **by, statuses=[status["errored"]]) == [ids[1]]
    assert found(rest, **by, statuses=[status["errored"], status["active"]]) == [ids[1], ids[0]]
    assert found(rest, **by, statuses=[status["failed"], status["cancelled"]]) == []

    page = rest.search_sessions(types.SessionSearchRequest(session_id=ids[1])).result()
    (summary,) = page.sessions
    assert summary.owner == me
    assert summary.project_id == f"project-{mark}"
    assert summary.status.reason.type == "errored"
    assert summary.status.detail == "it broke"
    assert summary.checkpoints_count == 0
    assert datetime.now(UTC) - timedelta(minutes=10) < summary.created_at <= datetime.now(UTC)
    assert page.next_cursor is None
    services[0].close("success").result()


def test_the_first_reason_of_an_end_counts(gate, rest, mark):
    service = service_of(gate, user_metadata={"mark": mark})
    session = session_of(service)
    with gate.http() as client:
        for reason in ("interrupted", "success"):
            assert finish(client, session, reason).status_code == 204
        assert client.post("/api/v1/session_heartbeat", json={"session_id": session}).status_code
    (summary,) = (
        rest.search_sessions(types.SessionSearchRequest(session_id=session)).result().sessions
    )
    assert summary.status.reason.type == "interrupted"


def test_pages_of_a_search_add_up_and_a_foreign_cursor_is_refused(gate, rest, mark):
    made = []
    for number in range(5):
        with service_of(gate, user_metadata={"mark": mark, "n": str(number)}) as service:
            made.append(session_of(service))
    by = {"user_metadata": {"mark": mark}, "limit": 2}
    paged, cursor, pages = [], None, 0
    while True:
        page = rest.search_sessions(types.SessionSearchRequest(**by, cursor=cursor)).result()
        paged += [session.session_id for session in page.sessions]
        pages += 1
        if page.next_cursor is None:
            break
        cursor = page.next_cursor
    assert (paged, pages) == (made[::-1], 3)

    forgotten = cursor.last_session_id.partition(".")[0]
    later = cursor.model_copy(update={"last_created_at": cursor.last_created_at + timedelta(1)})
    other = cursor.model_copy(
        update={"last_session_id": made[0] + cursor.last_session_id[len(made[0]) :]}
    )
    bare = cursor.model_copy(update={"last_session_id": made[2]})
    east = timezone(timedelta(hours=14))
    before_time = cursor.model_copy(update={"last_created_at": datetime(1, 1, 1, tzinfo=east)})
    for tampered in (later, other, bare, before_time):
        with pytest.raises(tinker.BadRequestError, match="cursor"):
            rest.search_sessions(types.SessionSearchRequest(**by, cursor=tampered)).result()
    with pytest.raises(tinker.BadRequestError, match="cursor"):
        rest.search_sessions(types.SessionSearchRequest(limit=2, cursor=cursor)).result()
    gate.run(gate.gateway.database.write(delete(sessions).where(sessions.c.id == forgotten)))
    after = rest.search_sessions(types.SessionSearchRequest(**by, cursor=cursor)).result()
    assert [each.session_id for each in after.sessions] == paged[paged.index(forgotten) + 1 :]


def test_a_search_with_a_filter_that_is_unknown_is_refused(gate):
    with gate.http() as client:
        for wrong in ({"limit": 0}, {"limit": 201}, {"nme": "x"}, {"statuses": []}):
            assert client.post("/api/v1/sessions/search", json=wrong).status_code == 400


def test_runs_are_listed_newest_first_with_their_number_and_by_project(gate, rest, mark):
    with service_of(gate, project_id=f"p-{mark}") as service:
        runs = [
            service.create_lora_training_client("tiny:full").result().model_id for _ in range(3)
        ]
        page = rest.list_training_runs(limit=2, project_id=f"p-{mark}").result()
        assert [run.training_run_id for run in page.training_runs] == [runs[2], runs[1]]
        assert (page.cursor.limit, page.cursor.offset, page.cursor.total_count) == (2, 0, 3)
        page = rest.list_training_runs(limit=2, offset=2, project_id=f"p-{mark}").result()
        assert [run.training_run_id for run in page.training_runs] == [runs[0]]
        everything = rest.list_training_runs(limit=1000).result()
        assert everything.cursor.total_count == len(everything.training_runs) >= 3
        assert [run.training_run_id for run in everything.training_runs][:3] == runs[::-1]

        rest.assign_session_project(session_of(service), f"moved-{mark}").result()
        assert not rest.list_training_runs(project_id=f"p-{mark}").result().training_runs
        moved = rest.list_training_runs(project_id=f"moved-{mark}").result()
        assert moved.cursor.total_count == 3
        assert found(rest, project_ids=[f"moved-{mark}"]) == [session_of(service)]
        late = new_run(service).model_id
        moved = rest.list_training_runs(project_id=f"moved-{mark}").result()
        assert moved.training_runs[0].training_run_id == late
    with pytest.raises(tinker.NotFoundError):
        rest.assign_session_project("s-000000000000", "x").result()


def test_a_run_is_described_in_full(gate, rest):
    with service_of(gate) as service:
        training = service.create_lora_training_client(
            "tiny:full", user_metadata={"why": "because"}
        ).result()
        run = rest.get_training_run(training.model_id).result()
        created = run.last_request_time
        assert (run.last_checkpoint, run.last_sampler_checkpoint) == (None, None)
        training.save_state("one").result()
        training.save_state("two", user_metadata={"k": "v"}).result()
        training.save_weights_for_sampler("three").result()
        training.forward([supervised([1, 2, 9])], "cross_entropy").result()
        run = rest.get_training_run(training.model_id).result()
        assert (run.base_model, run.model_owner, run.corrupted) == ("tiny", "local", False)
        assert (run.is_lora, run.lora_rank) == (False, None)
        assert run.user_metadata == {"why": "because"}
        assert created < run.last_request_time <= datetime.now(UTC)
        assert run.last_checkpoint.tinker_path == f"tinker://{training.model_id}/weights/two"
        assert run.last_checkpoint.user_metadata == {"k": "v"}
        assert run.last_sampler_checkpoint.checkpoint_id == "sampler_weights/three"
        by_path = rest.get_training_run_by_tinker_path(run.last_checkpoint.tinker_path).result()
        assert by_path == run
        page = rest.search_sessions(
            types.SessionSearchRequest(session_id=session_of(service))
        ).result()
        assert page.sessions[0].checkpoints_count == 3
        assert page.sessions[0].checkpoint_storage_bytes == 2 * 15 + (
            run.last_sampler_checkpoint.size_bytes
        )
        session = session_of(service)
    ended = rest.get_training_run(training.model_id).result()
    assert not ended.corrupted, "a run that ended with its session is not a failed one"
    assert rest.get_session(session).result().training_run_ids == [training.model_id]
    with pytest.raises(tinker.NotFoundError):
        rest.get_training_run("s-1:train:0").result()


def test_a_run_whose_trainer_died_for_good_is_called_corrupted(gate, rest, monkeypatch):
    monkeypatch.setattr(gate.settings, "recovery_enabled", False)
    with service_of(gate) as service:
        training = service.create_lora_training_client("tiny:full").result()
        worker_id, _ = gate.worker("trainer")
        gate.run(gate.launcher.kill(worker_id, "killed by the test"))
        with pytest.raises(tinker.RequestFailedError):
            training.forward([supervised([1, 9])], "cross_entropy").result()
        assert rest.get_training_run(training.model_id).result().corrupted
