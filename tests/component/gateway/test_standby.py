"""Two gateways on one PostgreSQL database. One waits."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from contextlib import AsyncExitStack

import httpx
import pytest
from sqlalchemy import event, insert, select, update

from gateway.app import create_app
from gateway.storage.database import Database
from gateway.storage.leadership import Leadership
from gateway.storage.tables import audit, keys, leader, metadata
from gateway.workers.epoch import epoch_without_leader
from tandem.errors import InvalidRequest, StorageFailed
from tandem.stack import Stack, read_endpoint
from tests.support.gateway.fake_launcher import FakeLauncher
from tests.support.gateway.requests import optim_step
from tests.support.gateway.running import running_gateway, settings_for
from tests.support.postgres import url_for, used_for_all
from tests.support.waiting import PATIENCE, until, wait_until

ROW = {"at": 0.0, "actor": "a", "action": "a", "status": 200}
NEVER = 1e6
SOON = 0.3


@pytest.fixture(autouse=True)
def on_postgres(postgres):
    with used_for_all(postgres):
        yield


@pytest.fixture
async def leadership_of(tmp_path):
    """Lets several gateways of one database stand for leadership."""
    async with AsyncExitStack() as stack:

        async def open_(timeout: float = NEVER) -> Leadership:
            found = Leadership.open(url=url_for(tmp_path), timeout=timeout)
            return await stack.enter_async_context(found)

        yield open_


async def test_one_of_many_becomes_the_leader_and_the_next_one_when_it_resigns(tmp_path):
    async with Leadership.open(url=url_for(tmp_path), timeout=NEVER) as last:
        async with AsyncExitStack() as stack:
            opened = [Leadership.open(url=url_for(tmp_path), timeout=NEVER) for _ in range(4)]
            several = [await stack.enter_async_context(each) for each in opened]
            taken = await asyncio.gather(*(each.take() for each in several))
            assert taken.count(True) == 1
            assert not await last.take()
            assert last.holder
            waiting = asyncio.create_task(last.wait())
        await asyncio.wait_for(waiting, PATIENCE)
        assert last.epoch > max(each.epoch for each in several) > 0


async def test_a_holder_whose_beat_stands_still_loses_the_leadership_and_learns_it(leadership_of):
    first, second = await leadership_of(), await leadership_of(timeout=0.0)
    assert await first.take()
    assert await second.take()
    assert second.epoch > first.epoch > 0
    first._timeout = SOON
    await asyncio.wait_for(first.lost(), PATIENCE)


async def test_a_holder_is_newer_than_all_before_it_also_in_another_database(leadership_of):
    """As with an epoch of SQLite that an agent remembers, or after an older dump."""
    first, second = await leadership_of(), await leadership_of()
    assert await first.take()
    assert first.epoch > epoch_without_leader()
    with first.engine.begin() as connection:
        connection.execute(update(leader).values(epoch=5, holder=""))
    assert await second.take()
    assert second.epoch > first.epoch


async def test_a_clock_that_was_set_back_makes_no_holder_older(leadership_of, monkeypatch):
    first, second = await leadership_of(), await leadership_of(timeout=0.0)
    assert await first.take()
    monkeypatch.setattr("gateway.storage.leadership.time.time", lambda: 1.0)
    assert await second.take()
    assert second.epoch == first.epoch + 1


async def test_a_holder_that_counts_keeps_the_leadership(leadership_of, monkeypatch):
    """On the waiting gateway's clock, an age passes between looks."""
    first, second = await leadership_of(timeout=SOON), await leadership_of(timeout=NEVER)
    now = [0.0]
    monkeypatch.setattr("gateway.storage.leadership.time.monotonic", lambda: now[0])
    assert await first.take()
    assert not await second.take()
    for _ in range(3):
        now[0] += 2 * NEVER
        assert await first._in_thread(first._beat)
        assert not await second.take()
    now[0] += 2 * NEVER
    assert await second.take()


async def test_a_leader_that_was_killed_is_replaced_at_once(leadership_of, tmp_path):
    """Even before the parent knows of its end."""
    hold = (
        "import asyncio, sys, time\n"
        "from gateway.storage.leadership import Leadership\n"
        "async def hold():\n"
        "    async with Leadership.open(url=sys.argv[1], timeout=1e6) as leadership:\n"
        "        print(await leadership.take(), flush=True)\n"
        "        await asyncio.sleep(600)\n"
        "asyncio.run(hold())\n"
    )
    command = [sys.executable, "-c", hold, url_for(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:  # noqa: ASYNC220 - see above
        try:
            while await asyncio.to_thread(process.stdout.readline) != b"True\n":
                assert process.poll() is None
            second = await leadership_of()
            assert not await second.take()
        finally:
            process.kill()
        await asyncio.wait_for(second.wait(), PATIENCE)


async def test_the_database_refuses_what_an_older_gateway_writes(leadership_of, tmp_path):
    first = await leadership_of()
    assert await first.take()
    database = Database(url=url_for(tmp_path), data_dir=tmp_path, leadership=first)
    await database.open()
    await database.write(insert(audit), ROW)
    assert await (await leadership_of(timeout=0.0)).take()
    with pytest.raises(StorageFailed, match="another gateway has taken over"):
        await database.write(insert(audit), ROW)
    database.write_soon(insert(audit), ROW)
    assert not await database.flush()
    assert len(await database.read(select(audit))) == 1
    await database.close()


async def test_a_standby_has_read_each_table_on_two_connections(leadership_of, tmp_path):
    leader_ = await leadership_of()
    assert await leader_.take()
    database = Database(url=url_for(tmp_path), data_dir=tmp_path, leadership=leader_)
    await database.open()
    await database.close()
    standby, reads = await leadership_of(), []

    @event.listens_for(standby.engine, "before_cursor_execute")
    def note(connection, _cursor, statement, *_more):
        reads.append((id(connection.connection.dbapi_connection), statement))

    def connections_that_read(table: str) -> int:
        return len({connection for connection, text in reads if f"FROM {table}" in text})

    waiting = asyncio.create_task(standby.wait())
    await until(lambda: all(connections_that_read(name) == 2 for name in metadata.tables))
    waiting.cancel()


def test_a_standby_is_alive_and_not_ready_until_it_takes_over(tmp_path):
    with running_gateway(tmp_path, session_ttl=600, leader_timeout=NEVER) as first:
        run = first.run_id(first.session_id())
        with first.http() as client:
            optim_step(client, run, 1)
            result = first.retrieve(f"{run}:1").content
        with (
            running_gateway(tmp_path, standby=True, long_poll=SOON, leader_timeout=NEVER) as second,
            second.http() as client,
        ):
            assert client.get("/api/v1/healthz").json() == {"status": "ok"}
            assert "tandem_gateway_" in client.get("/metrics").text
            for path in ("readyz", "sessions"):
                refused = client.get(f"/api/v1/{path}")
                assert (refused.status_code, refused.json()["type"]) == (503, "standing_by")
                assert "Retry-After" in refused.headers
            held = client.post("/api/v1/retrieve_future", json={"request_id": f"{run}:1"})
            assert (held.status_code, held.json()["type"]) == (408, "try_again")
            first.server.should_exit = True
            wait_until(lambda: client.get("/api/v1/readyz").status_code == 200)
            found = client.post("/api/v1/retrieve_future", json={"request_id": f"{run}:1"})
            assert found.content == result
            assert client.get("/api/v1/sessions").json()["sessions"]
            assert second.run_id(run.partition(":")[0], number=1)


def test_a_poll_that_reaches_the_standby_is_answered_when_it_takes_over(tmp_path):
    answers = []
    with running_gateway(tmp_path, session_ttl=600, leader_timeout=NEVER) as first:
        run = first.run_id(first.session_id())
        with first.http() as client:
            optim_step(client, run, 1)
            result = first.retrieve(f"{run}:1").content
        with running_gateway(tmp_path, standby=True, long_poll=40, leader_timeout=NEVER) as second:

            def poll() -> None:
                with second.http() as client:
                    body = {"request_id": f"{run}:1"}
                    answers.append(client.post("/api/v1/retrieve_future", json=body))

            polling = threading.Thread(target=poll, daemon=True)
            polling.start()
            first.server.should_exit = True
            polling.join(PATIENCE)
            assert [answer.content for answer in answers] == [result]


def test_a_request_that_reaches_the_standby_is_answered_when_it_takes_over(tmp_path):
    answers = []
    with running_gateway(tmp_path, session_ttl=600, leader_timeout=NEVER) as first:
        run = first.run_id(first.session_id())
        with running_gateway(tmp_path, standby=True, long_poll=40, leader_timeout=NEVER) as second:

            def step() -> None:
                with second.http() as client:
                    answers.append(optim_step(client, run, 1))

            stepping = threading.Thread(target=step, daemon=True)
            stepping.start()
            first.server.should_exit = True
            stepping.join(PATIENCE)
            assert [answer.json()["request_id"] for answer in answers] == [f"{run}:1"]
            assert second.retrieve(f"{run}:1").status_code == 200


def test_a_gateway_that_another_one_has_superseded_says_so_and_ends_itself(
    tmp_path, postgres, capfd
):
    ended = threading.Event()
    with running_gateway(tmp_path, leader_timeout=SOON, end=ended.set) as first:
        newer = update(leader).values(epoch=leader.c.epoch + 1, holder="another")
        with first.gateway.database._engine.begin() as connection:
            connection.execute(newer)
        assert ended.wait(PATIENCE)
        assert "another gateway has taken over from this one" in capfd.readouterr().err
        with first.http() as client:
            refused = client.post("/api/v1/create_session", json={"tags": [], "sdk_version": "1"})
            assert (refused.status_code, refused.json()["type"]) == (503, "storage_failed")


def test_a_standby_stops_without_having_led(tmp_path):
    with running_gateway(tmp_path, leader_timeout=NEVER) as first:
        with running_gateway(tmp_path, standby=True, leader_timeout=NEVER):
            pass
        with first.http() as client:
            assert client.get("/api/v1/readyz").status_code == 200
            assert (tmp_path / "data" / "gateway.json").exists()


async def test_gateways_that_start_at_once_make_one_bootstrap_key(tmp_path):
    """The leader makes it."""
    (key := tmp_path / "key").write_text(f"tml-{'a' * 32}")
    settings = settings_for(tmp_path, host="0.0.0.0", bootstrap_key_file=key)

    async def start_and_stop() -> None:
        app = create_app(settings, launcher=FakeLauncher(), end=lambda: None)
        async with app.router.lifespan_context(app):
            await until(lambda: hasattr(app.state, "gateway"))

    await asyncio.gather(*(start_and_stop() for _ in range(3)))
    database = Database(url=settings.database_url, data_dir=tmp_path)
    await database.open()
    rows = await database.read(select(keys))
    await database.close()
    assert [(row["name"], row["revoked_at"]) for row in rows] == [("bootstrap-key", None)]


async def test_keys_are_not_changed_beside_a_gateway_that_does_not_know(leadership_of, tmp_path):
    from gateway.admin.offline_keys import KeysRequest, answer

    holder = await leadership_of(timeout=SOON)
    assert await holder.take()
    serving = asyncio.create_task(holder.lost())
    settings = settings_for(tmp_path, database_url=url_for(tmp_path), leader_timeout=NEVER)
    with pytest.raises(InvalidRequest, match="a gateway uses the database"):
        await answer(KeysRequest(action="list"), settings)
    serving.cancel()


async def test_keys_are_changed_where_a_dump_names_a_leader_elsewhere(leadership_of, tmp_path):
    from gateway.admin.offline_keys import KeysRequest, answer

    holder = await leadership_of()
    assert await holder.take()
    settings = settings_for(tmp_path, database_url=url_for(tmp_path), leader_timeout=SOON)
    assert await answer(KeysRequest(action="list"), settings) == {"keys": []}


async def test_a_leader_stays_the_leader_while_the_database_is_away(leadership_of, monkeypatch):
    first, second = await leadership_of(timeout=SOON), await leadership_of(timeout=NEVER)
    assert await first.take()
    away, asked, take = [True], [], second.take

    async def take_or_fail() -> bool:
        asked.append(away[0])
        if away[0]:
            raise StorageFailed("away")
        return await take()

    assert not await second.take()
    monkeypatch.setattr(second, "take", take_or_fail)
    monkeypatch.setattr("gateway.storage.leadership._POLL", 0.01)
    second._seen_at -= 2 * NEVER
    waiting = asyncio.create_task(second.wait())
    await until(lambda: asked.count(True) > 1)
    away[0] = False
    await until(lambda: asked.count(False) > 1)
    assert not waiting.done()
    waiting.cancel()


def test_a_frozen_gateway_is_taken_over_from_and_ends_itself_when_it_goes_on(tmp_path):
    """In processes. The supervised first one becomes the second's standby."""
    data_dir = tmp_path / "data"
    shared = {"database_url": url_for(data_dir), "leader_timeout": "4", "port": "0"}
    variables = {f"TANDEM_{name.upper()}": value for name, value in shared.items()}
    with (
        (tmp_path / "second.log").open("wb") as log,
        Stack(data_dir=data_dir, settings=shared) as stack,
        subprocess.Popen(
            [sys.executable, "-m", "gateway"],
            env=os.environ | variables | {"TANDEM_DATA_DIR": str(data_dir)},
            stdout=log,
            stderr=log,
        ) as second,
    ):

        def has_said(event: str) -> bool:
            return f'"event":"{event}"' in (tmp_path / "second.log").read_text()

        try:
            wait_until(lambda: has_said("standing_by"))
            first, served_by = stack.process, stack.endpoint.pid
            assert served_by == first.pid
            os.kill(first.pid, signal.SIGSTOP)
            wait_until(lambda: read_endpoint(data_dir).pid == second.pid)
            os.kill(first.pid, signal.SIGCONT)
            assert first.wait(PATIENCE) == 1
            endpoint = read_endpoint(data_dir)
            assert endpoint.pid == second.pid, "it announces itself no more, and removes nothing"
            assert httpx.get(f"{endpoint.url}/api/v1/readyz", timeout=30).json()
        finally:
            second.terminate()
            assert second.wait(PATIENCE) == 0
        third = wait_until(lambda: read_endpoint(data_dir))
        assert third.pid not in (first.pid, second.pid)
        assert httpx.get(f"{third.url}/api/v1/readyz", timeout=30).is_success
