"""An admin reads changes, their authors and usage through the SDK."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime, timedelta

import pytest
import tinker
from tinker import types

from tests.support.audit_log import audit_log, days_of_tests
from tests.support.gateway.running import KEY, make_model
from tests.support.sdk import supervised


@pytest.fixture
def admin(gate):
    return tinker.AdminClient(base_url=gate.url, api_key=KEY)


def entries_of(admin, **filters) -> list:
    days = [filters.pop("day")] if "day" in filters else days_of_tests()
    return [e for day in days for e in admin.get_audit_log(day=day, **filters).result().entries]


def about(admin, target: str, **filters) -> list[tuple[str, int]]:
    entries = entries_of(admin, **filters)
    assert [e.timestamp for e in entries] == sorted(e.timestamp for e in entries)
    return [
        (e.event, e.event_details["status"]) for e in entries if e.event_details["target"] == target
    ]


def test_what_happens_to_a_checkpoint_is_told_in_order_with_its_actor(gate, admin):
    rest = tinker.RestClient(base_url=gate.url, api_key=KEY)
    with gate.service() as service:
        training = service.create_lora_training_client("tiny:full").result()
        path = training.save_state("seen").result().path
        training.forward_backward([supervised([1, 9])], "cross_entropy").result()
        rest.publish_checkpoint_from_tinker_path(path).result()
        rest.unpublish_checkpoint_from_tinker_path(path).result()
        rest.set_checkpoint_ttl_from_tinker_path(path, 7200).result()
        rest.delete_checkpoint_from_tinker_path(path).result()
        with pytest.raises(tinker.NotFoundError):
            rest.delete_checkpoint_from_tinker_path(path).result()
    expected = [
        ("checkpoint_write", 200),
        ("checkpoint_publish", 204),
        ("checkpoint_unpublish", 204),
        ("checkpoint_ttl_set", 204),
        ("checkpoint_delete", 204),
        ("checkpoint_delete", 404),
    ]
    assert about(admin, path) == expected
    assert about(admin, path, event_type="checkpoints") == expected
    assert about(admin, path, event_type="projects") == []
    assert about(admin, path, event_type="teams") == []
    assert about(admin, path, day=days_of_tests()[0] - timedelta(days=1)) == []
    assert about(admin, training.model_id) == [("run_create", 200)]
    entry = next(e for e in entries_of(admin) if e.event == "checkpoint_delete")
    assert entry.event_details["actor"] == "tml:organization_user:local"
    assert entry.event_details["address"] == "127.0.0.1"
    assert (entry.tinker_path, entry.model_id) == (path, training.model_id)


def test_a_session_and_its_project_are_told(gate, admin):
    rest = tinker.RestClient(base_url=gate.url, api_key=KEY)
    with gate.service() as service:
        session_id = service.holder.get_session_id()
        rest.assign_session_project(session_id, "new").result()
    assert [event for event, _ in about(admin, session_id)] == [
        "session_create",
        "project_assign",
        "session_finish",
    ]
    assert about(admin, session_id, event_type="projects") == [("project_assign", 204)]
    (entry,) = [
        e
        for e in entries_of(admin, event_type="projects")
        if e.event_details["target"] == session_id
    ]
    assert (entry.event_details["before"], entry.event_details["project_id"]) == ("", "new")


def test_rows_hold_no_key_no_token_and_no_content(gate, admin, tmp_path):
    secret = "a-secret-of-the-client"
    with gate.service() as service:
        service.create_lora_training_client("tiny:full", user_metadata={"secret": secret}).result()
        token = service.holder.run_coroutine_threadsafe(service.holder.get_identity_jwt()).result()
    with gate.http() as client:
        path = str(make_model(tmp_path / "model"))
        client.post("/api/tandem/v1/models", json={"name": "audited", "path": path})
        client.delete("/api/tandem/v1/models/audited")
        client.post("/api/v1/create_session", json={"user_metadata": secret})
        log = json.dumps(audit_log(client))
    assert "model_add" in log
    assert about(admin, "audited", event_type="organizations") == [
        ("model_add", 200),
        ("model_remove", 204),
    ]
    for hidden in (secret, KEY, token):
        assert hidden not in log


def test_what_gets_to_no_route_that_changes_anything_leaves_no_row(gate, admin):
    before = len(entries_of(admin))
    with gate.http() as client:
        wrong = {"X-API-Key": "tml-wrong"}
        for path, status in (("healthz", 405), ("sessions", 405), ("nowhere", 404)):
            assert client.post(f"/api/v1/{path}").status_code == status
        for path in ("trace_files/x.json", "downloads/s-1:train:0/weights/a/b"):
            assert client.post(f"/api/v1/{path}", headers=wrong).status_code == 405
    assert len(entries_of(admin)) == before


def test_without_a_day_it_is_the_day_now(gate, admin):
    with gate.http() as client:
        client.delete("/api/tandem/v1/models/unknown")

    def log(day: date | None = None) -> list[dict]:
        entries = admin.get_audit_log(event_type="organizations", day=day).result().entries
        return [entry.model_dump() for entry in entries]

    before, shown, after = days_of_tests()[-1], log(), days_of_tests()[-1]
    assert shown in (log(before), log(after))


NO_DAYS = ("yesterday", "0", "20260701", "1782864000", "2026-13-01", "")


def test_a_filter_that_is_unknown_is_refused(gate):
    with gate.http() as client:
        for wrong in ({"event_type": "everything"}, *({"day": day} for day in NO_DAYS)):
            answer = client.get("/api/v1/audit", params=wrong)
            assert (answer.status_code, answer.json()["type"]) == (400, "invalid_request")
        assert client.get("/api/v1/audit", headers={"X-API-Key": "tml-no"}).status_code == 401


def test_steps_and_samples_are_in_the_operation_log_alone(gate, admin):
    with gate.service() as service:
        training = service.create_lora_training_client("tiny:full").result()
        before = len(entries_of(admin))
        training.forward_backward([supervised([1, 9])], "cross_entropy").result()
        training.optim_step(types.AdamParams()).result()
        assert len(entries_of(admin)) == before


def test_a_window_that_makes_no_sense_is_refused(admin):
    hour = timedelta(hours=1)
    now = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    for start, end, why in (
        (now.replace(minute=30), now + hour, "on the hour"),
        (now, now, "before"),
        (now + hour, now, "before"),
        (now - timedelta(days=15), now, "14 days"),
        (now + 2 * hour, now + 3 * hour, "future"),
    ):
        with pytest.raises(tinker.BadRequestError, match=why):
            admin.get_billing_usage(start, end).result()
    assert admin.get_billing_usage(now - timedelta(days=14), now).result().data is not None
