"""`tandem report`: the work of owners on blueprints."""

from __future__ import annotations

import json
import time

import pytest
from sqlalchemy import insert

from gateway.owners.auth.keys import NewKey
from gateway.storage.tables import worker_events
from tests.support.sdk import supervised

HOUR, DAY = 3600, 86_400


@pytest.fixture
def events(gate):
    """Write worker events of an owner: (key, state, seconds ago), in order."""

    def write(owner: str, *rows: tuple[str, str, float]) -> None:
        now = time.time()
        common = {"kind": "trainer", "owner": owner, "group_name": "", "reason": ""}
        values = [
            common | {"key": key, "session_id": key.partition(":")[0], "state": state}
            | {"at": now - ago, "busy_seconds": 0.0}
            for key, state, ago in rows
        ]  # fmt: skip
        gate.run(gate.gateway.database.write(insert(worker_events), *values, durable=True))

    return write


def key_of(gate, owner: str, role: str) -> str:
    return gate.run(gate.gateway.keys.create(NewKey(owner=owner, role=role)))[1]


def report_of(tandem, key: str, owner: str, since: str = "7d") -> dict[str, dict]:
    """Return the owner's rows by blueprint."""
    rows = json.loads(tandem("report", "--since", since, "--json", key=key))["blueprints"]
    return {row["blueprint"]: row for row in rows if row["owner"] == owner}


def test_a_session_counts_for_the_blueprint_of_its_runs(gate, tandem, training):
    path = f"/api/tandem/v1/runs/{training.model_id}"
    with gate.http() as admin:
        assert admin.patch(path, json={"tags": ["blueprint:sums", "x"]}).status_code == 200
        before = admin.get("/api/tandem/v1/usage/blueprints").json()["blueprints"]
    training.forward_backward([supervised([1, 9, 3])], "cross_entropy").result()
    with gate.http() as admin:
        after = admin.get("/api/tandem/v1/usage/blueprints").json()["blueprints"]

    def of_sums(rows: list[dict]) -> dict:
        (found,) = (row for row in rows if row["blueprint"] == "sums")
        return found

    assert of_sums(after)["runs"] == 1
    used = of_sums(after)["device_seconds"] - of_sums(before)["device_seconds"]
    assert used >= 0.5, "the fake trainer's seconds"
    assert of_sums(after)["owner"] == "local"


def test_queue_seconds_are_those_of_the_time_without_a_place(gate, tandem, events):
    owner, key = "queuer", key_of(gate, "queuer", "reader")
    events(
        owner,
        ("s-aa:train:0", "waiting", 3 * DAY + 500),
        ("s-aa:train:0", "placed", 3 * DAY + 200),
        ("s-aa:train:0", "starting", 3 * DAY + 100),
        ("s-bb:train:0", "waiting", 2 * HOUR),  # it began before the last hour
        ("s-aa:train:0", "gone", 3 * DAY),
        ("s-bb:train:0", "starting", HOUR - 600),
    )
    assert report_of(tandem, key, owner)[""]["queue_seconds"] == pytest.approx(400 + HOUR + 600)
    assert report_of(tandem, key, owner, "1h")[""]["queue_seconds"] == pytest.approx(600, abs=60)


def test_a_worker_that_still_waits_counts_until_now(gate, tandem, events):
    owner, key = "patient", key_of(gate, "patient", "reader")
    events(owner, ("s-cc:train:0", "waiting", 1000))
    assert report_of(tandem, key, owner)[""]["queue_seconds"] == pytest.approx(1000, abs=60)


def test_a_member_sees_its_own_work_and_a_maintainer_that_of_all(gate, tandem, events):
    events("ann", ("s-dd:train:0", "waiting", 100), ("s-dd:train:0", "gone", 50))
    ben, max_ = key_of(gate, "ben", "member"), key_of(gate, "max", "maintainer")
    assert report_of(tandem, ben, "ann") == {}
    assert report_of(tandem, max_, "ann")[""]["queue_seconds"] == pytest.approx(50)


def test_the_report_is_markdown_with_the_budgets_left(gate, tandem, events):
    owner, key = "zoe", key_of(gate, "zoe", "member")
    events(owner, ("s-ee:train:0", "waiting", 2100), ("s-ee:train:0", "gone", 900))
    with gate.http() as admin:
        change = {"device_hours": 2.5, "tokens": None}
        assert admin.patch(f"/api/tandem/v1/owners/{owner}", json=change).status_code == 200
    told = tandem("report", key=key)
    assert told.startswith("# Use since 20")
    assert "| owner | blueprint | runs | queue seconds | device seconds |\n" in told
    assert "| --- | --- | ---: | ---: | ---: |\n| zoe | - | 0 | 1,200 | 0 |\n" in told
    assert told.endswith("| owner | device-hours | tokens |\n| --- | ---: | ---: |\n"
                         "| zoe | 2.5 | unlimited |\n")  # fmt: skip
