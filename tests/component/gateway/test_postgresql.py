"""PostgreSQL restarts, drops connections and refuses rows."""

from __future__ import annotations

import asyncio

import psycopg
import pytest
from psycopg import errors
from sqlalchemy import Table, insert, select, update
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError

from gateway.storage.database import Database
from gateway.storage.drivers import typed
from gateway.storage.tables import audit, sessions, training_steps, usage
from tandem.errors import InvalidRequest, StorageFailed, StorageFull
from tests.support.gateway.requests import optim_step
from tests.support.gateway.running import running_gateway
from tests.support.postgres import programs, running_postgres, used_for_all
from tests.support.waiting import until, wait_until

ROW = {"at": 0.0, "actor": "a", "action": "a", "status": 200}
USED = {
    "hour": 0, "event": "sample", "subject": "s-1:sample:0", "session_id": "s-1",
    "owner": "ann", "base_model": "tiny", "count": 1, "input_tokens": 1, "cached_tokens": 0,
    "output_tokens": 0, "accelerator_seconds": 0.0,
}  # fmt: skip


@pytest.fixture(scope="module")
def server():
    if programs() is None:
        pytest.skip("PostgreSQL is not installed (apt-get install postgresql)")
    with running_postgres() as server, used_for_all(server):
        yield server


@pytest.fixture
async def database(server, tmp_path, monkeypatch):
    monkeypatch.setattr("gateway.storage.database._RETRY_AFTER", 0.01)
    database = Database(url=server.database_for(tmp_path), data_dir=tmp_path)
    await database.open()
    yield database
    await database.close()


def add_usage(database: Database) -> None:
    database.write_soon(database.insert_or_add(usage, counters=["count"]), USED)


async def rows(database: Database, table: Table) -> list[dict]:
    return [dict(row) for row in await database.read(select(table))]


async def test_a_restart_of_the_server_loses_nothing_and_repeats_nothing(database, server):
    add_usage(database)
    assert await database.flush()
    await asyncio.gather(*(database.read(select(usage)) for _ in range(8)))  # connects all readers
    await asyncio.to_thread(server.stop)
    add_usage(database)
    assert not await database.flush()
    add_usage(database)
    with pytest.raises(StorageFailed, match="no connection"):
        await database.write(insert(audit), ROW)
    with pytest.raises(StorageFailed):
        await database.read(select(usage))
    with pytest.raises(StorageFailed):
        await database.check()
    await asyncio.to_thread(server.start)
    await until(lambda: database.failure is None)
    await database.flush()
    found = await asyncio.gather(*(rows(database, usage) for _ in range(8)))
    assert [each[0]["count"] for each in found] == [3] * 8
    assert await rows(database, audit) == []
    await database.check()


async def test_connections_that_the_server_broke_off_are_made_anew(database, server, tmp_path):
    """As after a restart, or behind a proxy that closes idle connections."""
    await asyncio.gather(*(database.read(select(usage)) for _ in range(8)))
    with psycopg.connect(server.database_for(tmp_path)) as other:
        other.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
    assert await asyncio.gather(*(rows(database, usage) for _ in range(8))) == [[]] * 8
    add_usage(database)
    add_usage(database)
    await until(lambda: not database._kept)
    assert (await rows(database, usage))[0]["count"] == 2


@pytest.mark.parametrize("committed", [True, False])
async def test_what_was_committed_when_the_connection_broke_is_committed_once(
    database, monkeypatch, committed
):
    commit, broken = psycopg.Connection.commit, []

    def break_off(connection) -> None:
        if broken:
            return commit(connection)
        broken.append(connection)
        if committed:
            commit(connection)
        connection.close()
        raise psycopg.OperationalError("server closed the connection unexpectedly")

    monkeypatch.setattr(psycopg.Connection, "commit", break_off)
    add_usage(database)
    await until(lambda: not database._kept)
    assert broken
    assert (await rows(database, usage))[0]["count"] == 1
    broken.clear()
    if committed:
        await database.write(insert(audit), ROW)
    else:
        with pytest.raises(StorageFailed):
            await database.write(insert(audit), ROW)
    assert len(await rows(database, audit)) == committed


async def test_a_row_that_is_refused_fails_alone(database):
    step = {"run_id": "s-1:train:0", "step": 1, "at": 0.0, "seconds": 0.0, "tokens": 1}
    step |= {"weight_version": "", "metrics": {}}
    good = [ROW | {"actor": str(number)} for number in range(3)]
    cases = [
        (insert(audit), ROW | {"action": "a" * 65}),
        (insert(audit), ROW | {"status": 2**31}),
        (insert(audit), ROW | {"actor": None}),
        (insert(training_steps), step | {"seq_id": 1, "metrics": {"loss": float("nan")}}),
        (insert(training_steps), step | {"seq_id": 2**63}),
        (update(audit).where(audit.c.status == 200).values(at="no number"), None),
    ]
    tasks = [database.write(insert(audit), row) for row in good]
    tasks += [database.write(statement, *([row] if row else [])) for statement, row in cases]
    done = await asyncio.gather(*tasks, return_exceptions=True)
    assert done[:3] == [None] * 3
    assert not any(isinstance(error, StorageFailed | None) for error in done[3:])
    assert [row["actor"] for row in await rows(database, audit)] == ["0", "1", "2"]
    assert database.failure is None


async def test_text_of_any_characters_is_kept(database):
    odd = {
        "id": "s-1",
        "state": "active",
        "display_name": "a\0b",
        "owner": "ann",
        "created_at": 0.0,
    }
    told = {"user_metadata": {"a\0": "\0", "é": "\ud7ff"}, "tags": ["\0"]}
    await database.write(insert(sessions), odd | told)
    (found,) = await rows(database, sessions)
    assert found["display_name"] == "a\ufffdb"
    assert {name: found[name] for name in told} == told
    assert await database.read(select(sessions).where(sessions.c.id == "s-1\0")) == []


@pytest.mark.parametrize(
    "cause, kind",
    [
        (errors.DiskFull("full"), StorageFull),
        (errors.AdminShutdown("stops"), StorageFailed),
        (errors.TooManyConnections("many"), StorageFailed),
        (errors.ReadOnlySqlTransaction("is a standby"), StorageFailed),
        (errors.DeadlockDetected("deadlock"), StorageFailed),
        (errors.DataCorrupted("corrupt"), StorageFailed),
        (errors.IoError("broken"), StorageFailed),
        (psycopg.OperationalError("could not connect"), StorageFailed),
        (errors.StringDataRightTruncation("long"), DataError),
        (errors.UniqueViolation("twice"), IntegrityError),
        (errors.ProgramLimitExceeded("an index row is too large"), DBAPIError),
        (psycopg.DataError("NUL"), DataError),
    ],
)
def test_an_error_is_the_rows_or_the_storages(cause, kind):
    wrapped = DBAPIError.instance("SELECT 1", {}, cause, psycopg.Error)
    assert isinstance(typed(wrapped), kind)
    assert isinstance(typed(wrapped), StorageFailed) == issubclass(kind, StorageFailed)


@pytest.mark.parametrize("url", ["no url", "mysql://localhost/x", "oracle://x"])
def test_a_url_of_no_such_database_is_refused_in_a_sentence(url, tmp_path):
    with pytest.raises(InvalidRequest, match=r"TANDEM_DATABASE_URL.*postgresql://"):
        Database(url=url, data_dir=tmp_path)


@pytest.mark.parametrize("encoding", ["SQL_ASCII", "LATIN1"])
async def test_a_database_that_cannot_have_all_texts_is_refused_in_a_sentence(
    server, tmp_path, encoding
):
    with psycopg.connect(server.url(), autocommit=True) as connection:
        connection.execute(
            f"CREATE DATABASE {encoding} ENCODING '{encoding}' TEMPLATE template0 "
            "LOCALE_PROVIDER libc LOCALE 'C'"
        )
    database = Database(url=server.url(encoding.lower()), data_dir=tmp_path)
    with pytest.raises(InvalidRequest, match=f"encoding {encoding}.*createdb --encoding=UTF8"):
        await database.open()
    await database.close()


def test_a_gateway_outlives_a_restart_of_its_database(server, tmp_path):
    with running_gateway(tmp_path, session_ttl=600) as gate, gate.http() as client:
        run = gate.run_id(gate.session_id())
        optim_step(client, run, 1)
        gate.retrieve(f"{run}:1")
        server.stop("immediate")
        refused = optim_step(client, run, 2)
        assert (refused.status_code, refused.json()["type"]) == (503, "storage_failed")
        assert "Retry-After" in refused.headers
        assert client.get("/api/v1/readyz").status_code == 503
        assert client.get("/api/v1/healthz").status_code == 200
        server.start()
        wait_until(lambda: client.get("/api/v1/readyz").status_code == 200)
        assert optim_step(client, run, 2).status_code == 200
        assert gate.retrieve(f"{run}:2").json()["metrics"] == {"grad_norm": 1.5}
        assert gate.run_id(gate.session_id())
        shown = client.get("/api/tandem/v1/config").json()["database_url"]
        assert (shown.partition("…")[0], "?" in shown) == ("postgresql://", False)
