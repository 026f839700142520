"""When the silence of a session's client means that it is gone."""

from __future__ import annotations

from weakref import ref

import pytest

from gateway.limits import Quotas
from gateway.metrics import Metrics
from gateway.sessions.registry import Connection, NewSession, SessionRegistry
from gateway.storage.database import Database
from tandem.request_settings import LimitSettings
from tests.support.postgres import url_for

pytestmark = pytest.mark.usefixtures("each_database")


@pytest.fixture
async def sessions(tmp_path):
    database = Database(url=url_for(tmp_path), data_dir=tmp_path)
    await database.open()
    limits = Quotas(settings=LimitSettings(), metrics=Metrics())
    yield SessionRegistry(database=database, limits=limits, ttl=60, left_ttl=25)
    await database.close()


async def silent_session(sessions):
    session = await sessions.create(NewSession(owner="local"))
    session.seen_at -= 30
    return session


async def test_a_client_that_closed_its_connections_gets_less_time_than_a_silent_one(sessions):
    session = await silent_session(sessions)
    first, second = Connection(), Connection()
    for connection in (first, second, first):
        connection.carries(session)
    first.lost(by_client=True)
    assert sessions.overdue() == {}, "the other connection is open"
    second.lost(by_client=True)
    detail = "its client disconnected; no heartbeat for 25 s"
    assert sessions.overdue() == {session.id: detail}
    Connection().carries(session)
    assert sessions.overdue() == {}, "it came back"


async def test_connections_that_the_server_closed_say_nothing_about_the_client(sessions):
    session = await silent_session(sessions)
    connection = Connection()
    connection.carries(session)
    connection.lost(by_client=False)
    assert sessions.overdue() == {}


async def test_a_request_that_is_read_after_its_connection_ended_keeps_no_count(sessions):
    session = await silent_session(sessions)
    late, last = Connection(), Connection()
    last.carries(session)
    late.lost(by_client=True)
    late.carries(session)
    last.lost(by_client=True)
    assert list(sessions.overdue()) == [session.id]


async def test_a_connection_keeps_no_session_that_has_ended(sessions):
    connection = Connection()
    kept = await sessions.create(NewSession(owner="local"))
    ended = await sessions.create(NewSession(owner="local"))
    connection.carries(kept)
    connection.carries(ended)
    await sessions.end(session_id=ended.id, state="finished", reason="success", detail="")
    ended_ref = ref(ended)
    del ended
    assert ended_ref() is None
    connection.lost(by_client=True)
    assert kept.left


async def test_a_gateway_that_stood_still_does_not_blame_its_clients(sessions):
    alive, silent = [await silent_session(sessions) for _ in range(2)]
    silent.seen_at -= 25  # of the 60 seconds, five are left
    for session in (alive, silent):
        session.seen_at -= 90
    sessions._ran_at -= 90
    assert sessions.overdue() == {}
    silent.seen_at -= 6
    assert sessions.overdue() == {silent.id: "no heartbeat for 60 s"}


async def test_a_gateway_that_runs_counts_all_of_the_silence(sessions):
    session = await silent_session(sessions)
    sessions._ran_at -= 4  # as when the event loop lags
    session.seen_at -= 29
    assert sessions.overdue() == {}
    session.seen_at -= 2
    assert list(sessions.overdue()) == [session.id]
