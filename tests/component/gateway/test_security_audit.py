"""Every changing request leaves a line in the audit log, even if refused."""

from __future__ import annotations

import json
import time

import pytest

from gateway.owners.auth.audit import UNKNOWN, UNKNOWN_ROWS, AuditLog, Entry
from tests.support.audit_log import audit_log
from tests.support.gateway.access_world import CALLS, OPERATIONS, World, routes
from tests.support.gateway.running import KEY

CHANGING = [(name, method) for name, method in routes() if OPERATIONS[name].audit]


def lines(world: World) -> list[dict]:
    with world.client(KEY) as client:
        return audit_log(client)


@pytest.mark.parametrize(("route", "method"), CHANGING)
def test_every_attempt_leaves_one_line_with_who_asked_and_how_it_ended(world, route, method):
    own = world.new_key("ann", "member") if route == "delete_own_key" else world.keys["admin"]
    attempts = {
        "": UNKNOWN,
        "tml-" + "A" * 43: UNKNOWN,
        world.keys["reader"]: "tml:organization_user:ann",
        world.keys["foreign"]: "tml:organization_user:ben",
        own: None,
    }
    if route == "delete_own_key":  # every role may do it with its own key
        del attempts[world.keys["reader"]], attempts[world.keys["foreign"]]
    for key, actor in attempts.items():
        call = CALLS[route](world)
        before = len(lines(world))
        answer = world.ask(method, call, key=key)
        if key == world.keys["foreign"] and answer.status_code != 404:
            continue  # it names nobody's thing, or is an admin's route
        expected = {UNKNOWN: 401, "tml:organization_user:ann": 403}.get(actor, answer.status_code)
        assert answer.status_code == expected
        (line,) = lines(world)[before:]
        details = line["event_details"]
        assert (line["event"], details["status"]) == (OPERATIONS[route].audit, expected)
        assert (details["actor"], details["address"]) == (actor or details["actor"], "127.0.0.1")
        assert details.get("key", "")[:2] == ("" if actor == UNKNOWN else "k-")
    assert answer.is_success or answer.is_redirect, answer.text
    assert details["target"], "what it was done to"


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
