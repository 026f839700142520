from __future__ import annotations

import pytest

from gateway.metrics import Metrics
from gateway.owners.limits import Quotas
from gateway.owners.sessions.registry import NewSession, SessionRegistry
from gateway.storage.database import Database
from tandem.settings.requests import LimitSettings
from tests.support.postgres import url_for

pytestmark = pytest.mark.usefixtures("each_database")


@pytest.fixture
async def sessions(tmp_path):
    database = Database(url=url_for(tmp_path), data_dir=tmp_path)
    await database.open()
    limits = Quotas(settings=LimitSettings(), metrics=Metrics())
    yield SessionRegistry(database=database, limits=limits, ttl=60)
    await database.close()


async def silent_session(sessions):
    session = await sessions.create(NewSession(owner="local"))
    session.seen_at -= 30
    return session


async def test_a_gateway_that_stood_still_does_not_blame_its_clients(sessions):
    alive, silent = [await silent_session(sessions) for _ in range(2)]
    silent.seen_at -= 25  # five of the 60 seconds are left
    for session in (alive, silent):
        session.seen_at -= 90
    sessions._ran_at -= 90
    assert sessions.overdue() == {}
    silent.seen_at -= 6
    assert sessions.overdue() == {silent.id: "no heartbeat for 60 s"}


async def test_a_gateway_that_runs_counts_all_of_the_silence(sessions):
    session = await silent_session(sessions)
    sessions._ran_at -= 4  # as if the event loop lagged
    session.seen_at -= 29
    assert sessions.overdue() == {}
    session.seen_at -= 2
    assert list(sessions.overdue()) == [session.id]
