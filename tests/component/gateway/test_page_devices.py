"""The page of the device groups."""

from __future__ import annotations

import re
import time

import pytest
from sqlalchemy import insert, update

from gateway.owners.auth.keys import NewKey
from gateway.storage.tables import runs, worker_events
from tests.support.gateway.running import KEY

HOSTILE = "<script>alert(1)</script> 🦊\u202e"


def page_of(gate, key=KEY, path="/devices"):
    with gate.http(key) as client:
        answer = client.get(path, headers={"Accept": "text/html"})
    assert answer.status_code == 200, answer.text
    return answer.text


def event(key, state, *, ago, owner="local", group="all", **values):
    return {
        "at": time.time() - ago,
        "key": key,
        "kind": "trainer",
        "owner": owner,
        "session_id": key.partition(":")[0],
        "group_name": group,
        "state": state,
        "busy_seconds": 0.0,
        "reason": "",
        **values,
    }


def record(gate, *events):
    gate.run(gate.gateway.database.write(insert(worker_events).values([*events])))


@pytest.fixture
def ann(gate):
    return gate.run(gate.gateway.keys.create(NewKey(owner="ann", role="reader")))[1]


def test_a_run_is_shown_by_its_name_which_stays_text(gate, training):
    run = training.model_id
    gate.run(gate.gateway.database.write(update(runs).where(runs.c.id == run).values(name=HOSTILE)))
    shown = page_of(gate)
    assert "<script>alert" not in shown
    assert "&lt;script&gt;alert(1)" in shown
    assert f'href="/runs/{run}"' in shown.replace("%3A", ":")
    assert 'class="bar awake"' in shown


def test_another_owners_worker_has_no_name_no_reason_and_no_times(gate, ann, training):
    record(
        gate,
        event("s-secret:train:0", "starting", ago=300, owner="ben", reason="a secret reason"),
        event("s-secret:train:0", "awake", ago=200, owner="ben"),
    )
    mine = page_of(gate, ann)
    for secret in ("s-secret", "ben", "a secret reason", training.model_id, "local"):
        assert secret not in mine
    assert "another owner" in mine
    assert "s-secret:train:0" in page_of(gate)  # an admin's


def test_a_state_that_began_before_the_shown_time_is_shown_from_its_beginning(gate):
    record(
        gate,
        event("s-old:train:0", "awake", ago=7200),
        event("s-old:train:0", "asleep", ago=1800, busy_seconds=40.0),
        event("s-old:train:0", "gone", ago=600),
        event("s-gone:train:0", "awake", ago=9000),
        event("s-gone:train:0", "gone", ago=8000),
    )
    shown = page_of(gate)
    lane = re.search(r"<title>s-old:train:0</title>.*?</g>", shown, re.DOTALL)[0]
    bars = re.findall(r'class="bar (\w+)" x="([\d.]+)" y="\d+" width="([\d.]+)"', lane)
    assert [state for state, _, _ in bars] == ["awake", "asleep"]
    (_, x, width), (_, then, _) = bars
    assert float(x) == 190.0  # the left edge
    assert float(width) == pytest.approx(500.0, abs=2)  # half of the hour
    assert float(then) == pytest.approx(690.0, abs=2)
    assert "awake for 5400 s, 40 s of it computing" in lane
    assert "s-gone" not in shown
    assert "s-gone" in page_of(gate, path="/devices?hours=6")


def test_only_a_wait_of_a_second_and_more_has_a_lane(gate):
    for key, seconds in (("s-soon:train:0", 0.5), ("s-late:train:0", 5.0)):
        record(
            gate,
            event(key, "waiting", ago=100, group=""),
            event(key, "placed", ago=100 - seconds),
            event(key, "gone", ago=90),
        )
    shown = page_of(gate)
    waits = shown[shown.index("Waiting for a group") :]
    assert "s-late" in waits and "s-soon" not in waits and "s-soon" in shown


def test_a_lane_of_many_short_states_has_a_bounded_number_of_bars(gate):
    states = ["awake", "asleep", "asleep"]
    flood = [
        event("s-flood:train:0", states[number % 3], ago=3000 - number / 2)
        for number in range(5000)
    ]
    flood += [event("s-flood:train:0", states[n % 2], ago=500 - 4 * n) for n in range(100)]
    record(gate, *flood)
    shown = page_of(gate)
    lane = re.search(r"<title>s-flood:train:0</title>.*?</g>", shown, re.DOTALL)[0]
    bars = re.findall(r'class="bar (\w+)" x="([\d.]+)" y="\d+" width="([\d.]+)"', lane)
    assert 100 < len(bars) <= 300
    assert re.search(r"\d+ short states, the longest asleep", lane)
    ends = [float(x) + float(width) for _, x, width in bars]
    starts = [float(x) for _, x, _ in bars]
    assert all(end - start < 1.2 for end, start in zip(ends, starts[1:], strict=False))
    assert ends[-1] == pytest.approx(1190.0, abs=1)


def test_the_page_of_a_week_is_read_without_a_script(gate):
    shown = page_of(gate, path="/devices?hours=168")
    assert "Over time" in shown
    with gate.http(KEY) as client:
        refused = client.get("/devices?hours=1000", headers={"Accept": "text/html"})
    assert refused.status_code == 400
