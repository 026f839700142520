"""A locked or full database, and work afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from sqlalchemy import delete, text

from gateway.storage.tables import audit
from tandem.errors import StorageFailed
from tests.support.files import entries
from tests.support.gateway.requests import finish, optim_step
from tests.support.gateway.running import forward_backward_bytes, running_gateway
from tests.support.postgres import locked_database, on_sqlite, wait_for_no_lock
from tests.support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("each_database")

MANY_PAGES = {"a": "x" * 16_000}


@pytest.fixture
def gate(tmp_path):
    with running_gateway(tmp_path, session_ttl=600) as gate:
        yield gate


@pytest.fixture
def run(gate) -> str:
    return gate.run_id(gate.session_id())


@contextmanager
def locked(gate) -> Iterator[None]:
    """Another process holds a write transaction."""
    gate.run(wait_for_no_lock(gate.gateway.database))
    with locked_database(gate.settings.data_dir):
        yield


@contextmanager
def full(gate) -> Iterator[None]:
    """The database may not grow, and has no free pages, which migrations leave."""
    write = gate.gateway.database.write
    free = "(SELECT freelist_count FROM pragma_freelist_count) * 4096"
    gate.run(write(text("CREATE TABLE IF NOT EXISTS filler (content BLOB)")))
    gate.run(write(text(f"INSERT INTO filler VALUES (zeroblob({free}))")))
    gate.run(write(text("PRAGMA max_page_count = 1")))
    yield
    gate.run(write(text("PRAGMA max_page_count = 4294967294")))


def save(client, run: str, seq_id: int, **fields):
    body = {"model_id": run, "seq_id": seq_id, **fields}
    return client.post("/api/v1/save_weights_for_sampler", json=body)


def new_session(client):
    body = {"tags": [], "sdk_version": "test", "user_metadata": MANY_PAGES}
    return client.post("/api/v1/create_session", json=body)


def test_a_locked_database_fails_the_save_and_not_the_run(gate, run, each_database):
    _, trainer = gate.worker("trainer")
    with gate.http() as client:
        gate.run(trainer.gate.clear)
        save(client, run, 1, path="kept")
        with locked(gate):
            gate.run(trainer.gate.set)
            failed = gate.retrieve(f"{run}:1").json()
        assert (failed["type"], failed["category"]) == ("storage_failed", "server")
        busy = "SQLITE_BUSY" if each_database == "sqlite" else "55P03"
        assert busy in failed["error"]
        assert "INSERT" not in failed["error"]
        optim_step(client, run, 2)
        assert gate.retrieve(f"{run}:2").json()["metrics"] == {"grad_norm": 1.5}
        save(client, run, 3, path="kept")
        assert gate.retrieve(f"{run}:3").json()["path"].endswith("/kept")


def test_a_number_of_an_ended_sampling_session_is_refused_and_the_run_goes_on(gate, run):
    with gate.http() as client:
        save(client, run, 1, sampling_session_seq_id=7)
        assert gate.retrieve(f"{run}:1").json()["sampling_session_id"].endswith(":sample:7")
        wait_until(lambda: not gate.gateway.futures.get(f"{run}:1").unrecorded)  # it has its row
        gate.run(lambda: gate.gateway.sampling.end_session(run.partition(":")[0]))
        save(client, run, 2, sampling_session_seq_id=7)
        failed = gate.retrieve(f"{run}:2").json()
        assert (failed["type"], "number" in failed["error"]) == ("invalid_request", True)
        save(client, run, 3, sampling_session_seq_id=8)
        assert gate.retrieve(f"{run}:3").json()["sampling_session_id"].endswith(":sample:8")


@on_sqlite
def test_a_full_database_is_told_with_a_time_to_come_back(gate):
    with gate.http() as client:
        with full(gate):
            refused = new_session(client)
        assert (refused.status_code, refused.json()["type"]) == (507, "storage_full")
        assert refused.json()["category"] == "server"
        assert float(refused.headers["Retry-After"]) == refused.json()["retry_after_seconds"]
        assert "INSERT" not in refused.text
        assert new_session(client).status_code == 200


def test_a_gateway_whose_database_is_locked_is_alive_and_not_ready(gate):
    with gate.http() as client:
        with locked(gate):
            refused = new_session(client)
            assert (refused.status_code, refused.json()["type"]) == (503, "storage_failed")
            assert "Retry-After" in refused.headers
            assert client.get("/api/v1/healthz").status_code == 200
            ready = client.get("/api/v1/readyz")
            assert (ready.status_code, ready.json()["type"]) == (503, "storage_failed")
        assert client.get("/api/v1/readyz").json() == {"status": "ready"}


def test_a_payload_that_the_disk_does_not_take_is_told_the_same_way(gate, run, monkeypatch):
    def no_room(_file, _content, **_more):
        raise OSError(28, "No space left on device", "/srv/tandem/operations/1")

    monkeypatch.setattr("gateway.runs.journal.write_file", no_room)
    with gate.http() as client:
        answer = client.post(
            "/api/v1/forward_backward",
            content=forward_backward_bytes(run, 1, tokens=2**15),
            headers={"Content-Type": "application/x-protobuf"},
        )
    assert (answer.status_code, answer.json()["type"]) == (507, "storage_full")
    assert "Retry-After" in answer.headers
    assert "/srv" not in answer.text


def test_an_operation_that_could_not_be_synced_is_synced_when_it_comes_again(
    gate, run, monkeypatch
):
    database, sync = gate.gateway.database, gate.gateway.database.sync
    tries = []

    async def sync_third() -> None:
        tries.append(1)
        if len(tries) < 3:
            raise StorageFailed("the disk failed")
        await sync()

    monkeypatch.setattr(database, "sync", sync_third)
    with gate.http() as client:
        statuses = [
            client.post(
                "/api/v1/forward_backward",
                content=forward_backward_bytes(run, 1),
                headers={"Content-Type": "application/x-protobuf"},
            ).status_code
            for _ in range(3)
        ]
    assert statuses == [503, 503, 200]
    assert gate.retrieve(f"{run}:1").is_success


def test_a_gateway_on_a_disk_with_too_little_room_is_alive_and_not_ready(tmp_path):
    with running_gateway(tmp_path, min_free_bytes=2**62) as gate, gate.http(key="") as client:
        assert client.get("/api/v1/healthz").status_code == 200
        ready = client.get("/api/v1/readyz")
        assert (ready.status_code, ready.json()["type"]) == (507, "storage_full")


@on_sqlite
def test_a_run_whose_creation_could_not_be_recorded_can_be_asked_for_again(gate):
    new = {"session_id": gate.session_id(), "model_seq_id": 0, "base_model": "tiny"}
    new["user_metadata"] = {"more": "x" * 16_000}  # too large for the database
    with gate.http() as client:
        with full(gate):
            refused = client.post("/api/v1/create_model", json=new)
        assert (refused.status_code, refused.json()["type"]) == (507, "storage_full")
        created = client.post("/api/v1/create_model", json=new).json()
        assert gate.retrieve(created["request_id"]).json() == {
            "type": "create_model",
            "model_id": created["model_id"],
        }


def test_what_a_session_leaves_while_the_database_fails_is_removed_afterwards(tmp_path):
    with (
        running_gateway(tmp_path, session_ttl=600, reaper_interval=0.02) as gate,
        gate.http() as client,
    ):
        session = gate.session_id()
        run = gate.run_id(session)
        save(client, run, 1, sampling_session_seq_id=0)
        gate.retrieve(f"{run}:1")
        folder = gate.settings.data_dir / "weights" / run.replace(":", "_")
        assert len(entries(folder)) == 1
        with locked(gate):
            assert finish(client, session).is_success
        wait_until(lambda: not entries(folder))


def test_housekeeping_says_once_that_the_storage_fails_and_once_that_it_works(
    tmp_path, capfd, monkeypatch
):
    with running_gateway(tmp_path, session_ttl=600, reaper_interval=0.01) as gate:
        rounds = []

        async def write_something() -> None:
            try:
                await gate.gateway.database.write(delete(audit).where(audit.c.at < 0))
            except StorageFailed:
                rounds.append("failed")
                raise
            rounds.append("done")

        monkeypatch.setattr(gate.gateway.checkpoints, "expire", write_something)
        with locked(gate):
            wait_until(lambda: rounds.count("failed") > 3)
        wait_until(lambda: rounds[-2:] == ["done", "done"])
    log = "".join(capfd.readouterr())
    assert "Traceback" not in log
    for event in ("housekeeping_waits_for_storage", "housekeeping_goes_on"):
        assert log.count(event) == 1
