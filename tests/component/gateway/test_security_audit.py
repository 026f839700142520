"""Each request that changes something leaves its line, the refused ones, too: for every route."""

from __future__ import annotations

import json
import time

import pytest

from gateway.auth.audit import UNKNOWN, UNKNOWN_ROWS, AuditLog, Entry
from tests.support.gateway.access_world import CALLS, OPERATIONS, World, routes
from tests.support.gateway.running import KEY, running_gateway

CHANGING = [(name, method) for name, method in routes() if OPERATIONS[name].audit]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("security-audit")
    with running_gateway(folder, session_ttl=600) as gate:
        yield World(gate, folder)


def lines(world: World) -> list[dict]:
    with world.client(KEY) as client:
        return client.get("/api/v1/audit").json()["entries"]


def new_line(world: World, before: int) -> dict:
    """The one line that came last."""
    found = lines(world)
    assert len(found) == before + 1, found[before:]
    return found[-1]


@pytest.mark.parametrize(("route", "method"), CHANGING)
def test_who_has_no_good_key_leaves_a_line_without_a_name(world, route, method):
    call = CALLS[route](world)
    before = len(lines(world))
    for key in ("", "tml-" + "A" * 43):
        assert world.ask(method, call, key=key).status_code == 401
    first, last = lines(world)[before:]
    for line in (first, last):
        details = line["event_details"]
        assert line["event"] == OPERATIONS[route].audit
        assert (details["actor"], details["status"]) == (UNKNOWN, 401)
        assert details["address"] == "127.0.0.1"
        assert "key" not in details


@pytest.mark.parametrize(("route", "method"), CHANGING)
def test_whose_role_does_not_suffice_leaves_a_line(world, route, method):
    if route == "delete_own_key":
        pytest.skip("everybody may do that")
    call = CALLS[route](world)
    before = len(lines(world))
    assert world.ask(method, call, key=world.keys["reader"]).status_code == 403
    details = new_line(world, before)["event_details"]
    assert (details["actor"], details["status"]) == ("tml:organization_user:ann", 403)
    assert details["key"].startswith("k-")


@pytest.mark.parametrize(("route", "method"), CHANGING)
def test_who_names_anothers_thing_leaves_a_line(world, route, method):
    call = CALLS[route](world)
    before = len(lines(world))
    answer = world.ask(method, call, key=world.keys["foreign"])
    if answer.status_code != 404:
        return  # it names no thing of anybody's, or is an admin's
    details = new_line(world, before)["event_details"]
    assert (details["actor"], details["status"]) == ("tml:organization_user:ben", 404)


@pytest.mark.parametrize(("route", "method"), CHANGING)
def test_what_is_done_leaves_a_line_with_what_it_was_done_to(world, route, method):
    key = world.keys["admin"]
    if route == "delete_own_key":
        key = world.new_key("ann", "member")
    call = CALLS[route](world)
    before = len(lines(world))
    answer = world.ask(method, call, key=key)
    assert answer.is_success, answer.text
    line = new_line(world, before)
    assert line["event"] == OPERATIONS[route].audit
    assert line["event_details"]["status"] == answer.status_code
    assert line["event_details"]["target"], "what it was done to"


def test_no_line_holds_a_key_that_was_put_in_the_wrong_place(world):
    secret = world.new_key("ann", "member")
    with world.client(KEY) as client:
        assert client.delete(f"/api/tandem/v1/keys/{secret}").status_code == 404
        assert client.delete(f"/api/tandem/v1/models/{secret}").status_code == 404
    with world.client("tml-wrong") as client:
        assert client.delete(f"/api/tandem/v1/keys/{secret}").status_code == 401
    assert secret not in json.dumps(lines(world))


async def test_strangers_cannot_fill_the_disk():
    class Counting:
        written = 0

        def write_soon(self, _statement, *_rows):
            self.written += 1

    database, now = Counting(), [time.monotonic()]
    log = AuditLog(database=database, clock=lambda: now[0])  # type: ignore[arg-type]
    entry = Entry(
        actor=UNKNOWN, action="a", target="", address="", status=401, detail={"reason": "r"}
    )
    for _ in range(UNKNOWN_ROWS * 5):
        log.record(entry)
    assert database.written == UNKNOWN_ROWS
    now[0] += 60
    log.record(entry)
    assert database.written == UNKNOWN_ROWS + 1
