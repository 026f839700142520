from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from sqlalchemy import insert, select
from sqlalchemy.exc import IntegrityError

from gateway.metrics import Metrics
from gateway.runs.journal import Journal
from gateway.runs.operations import Operation
from gateway.storage.database import Database
from gateway.storage.futures.table import Future, FutureTable, Result
from gateway.storage.tables import audit, operations
from tandem.errors import GatewayRestarted, InvalidRequest, StorageFailed, UnknownRequest
from tests.support.postgres import locked_database, on_sqlite, url_for, wait_for_no_lock
from tests.support.waiting import PATIENCE

pytestmark = pytest.mark.usefixtures("each_database")

RUN = "s-1:train:0"
LARGE = Result(media="protobuf", body=b"x" * 2**17)
SMALL = Result(media="json", body=b"{}")
BATCH = b"x" * 2**17
ROOM = len(LARGE.body) + 2 * len(SMALL.body)


class World:
    def __init__(self, data_dir: Path) -> None:
        self.data_dir = data_dir
        self.database = Database(url=url_for(data_dir), data_dir=data_dir, kept_bytes=ROOM)
        metrics = Metrics()
        futures = FutureTable(
            folder=data_dir / "samples",
            result_ttl=60,
            bytes_in_memory=2**20,
            max_samples=9,
            metrics=metrics,
        )
        self.journal = Journal(
            database=self.database,
            data_dir=data_dir,
            futures=futures,
            metrics=metrics,
            result_ttl=60,
        )

    async def accept(self, seq_id: int, *, payload: bytes | None = None) -> Operation:
        operation = self.operation(seq_id, payload=payload)
        await self.journal.accept(operation, payload=payload)
        return operation

    def operation(self, seq_id: int, *, payload: bytes | None = None) -> Operation:
        future = Future(
            request_id=f"{RUN}:{seq_id}", source="operation", describe=lambda: None, owner="ann"
        )
        return Operation(
            run_id=RUN,
            seq_id=seq_id,
            kind="forward_backward",
            future=future,
            has_payload=payload is not None,
            size=len(payload or b""),
        )

    async def states(self) -> dict[int, str]:
        found = select(operations.c.seq_id, operations.c.state).order_by(operations.c.seq_id)
        rows = await self.database.read(found)
        return {row["seq_id"]: row["state"] for row in rows}

    def payloads(self) -> list[str]:
        return sorted(p.name for p in (self.data_dir / "operations").rglob("*"))

    def locked(self) -> AbstractContextManager[None]:
        return locked_database(self.data_dir)


@pytest.fixture
async def world(tmp_path, monkeypatch):
    monkeypatch.setattr("gateway.storage.database._RETRY_AFTER", 0.01)
    world = World(tmp_path)
    await world.database.open()
    await wait_for_no_lock(world.database)
    yield world
    await world.database.close()


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not await condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("outcome", [SMALL, LARGE, InvalidRequest("no such field")])
async def test_an_outcome_is_told_while_the_database_fails_and_recorded_afterwards(world, outcome):
    operation = await world.accept(1, payload=BATCH)
    with world.locked():
        world.journal.end(operation, outcome)
        await world.database.flush()
        assert await world.journal.recall(f"{RUN}:1") is outcome
        assert "1" in world.payloads()
        assert world.database.failure is not None

    async def is_recorded() -> bool:
        return "accepted" not in (await world.states()).values()

    await until(is_recorded)
    await world.database.flush()
    assert world.database.failure is None
    recalled = await world.journal.recall(f"{RUN}:1")
    if isinstance(recalled, Result):
        assert (recalled.media, recalled.size) == (outcome.media, outcome.size)
    else:
        assert (type(recalled), recalled.message) == (InvalidRequest, "no such field")
    assert "1" not in world.payloads()


async def test_a_failure_is_told_when_it_is_recorded_or_cannot_be(world):
    recorded, refused = await world.accept(1), await world.accept(2)
    world.journal.end(recorded, InvalidRequest("no such field"))
    assert not recorded.future.ended, "a gateway that dies now has told nobody"
    await asyncio.wait_for(recorded.future.done, PATIENCE)
    assert (await world.states())[1] == "failed"
    with world.locked():
        world.journal.end(refused, InvalidRequest("no such field"))
        await asyncio.wait_for(refused.future.done, PATIENCE)


async def test_results_beyond_what_memory_may_hold_are_given_up_while_the_database_fails(world):
    first, second, third, later = [await world.accept(seq_id) for seq_id in range(1, 5)]
    with world.locked():
        world.journal.end(first, LARGE)
        await world.database.flush()
        world.journal.end(second, LARGE)
        world.journal.end(third, SMALL)
        outcomes = [await world.journal.recall(f"{RUN}:{seq_id}") for seq_id in (1, 2, 3)]
        assert (outcomes[0], outcomes[2]) == (LARGE, SMALL)
        assert isinstance(outcomes[1], UnknownRequest)
        assert second.future.outcome is LARGE, "who waits for it gets it"

    async def all_are_recorded() -> bool:
        return list((await world.states()).values()) == ["done", "done", "done", "accepted"]

    await until(all_are_recorded)
    assert (await world.journal.recall(f"{RUN}:1")).size == len(LARGE.body)
    assert isinstance(await world.journal.recall(f"{RUN}:2"), UnknownRequest)
    with world.locked():
        await asyncio.gather(world.database.check(), return_exceptions=True)
        world.journal.end(later, LARGE)
        await world.database.flush()
        assert await world.journal.recall(f"{RUN}:4") is LARGE, "the room is free again"


async def test_what_is_written_soon_keeps_its_order_while_the_database_fails(world):
    database = world.database

    def row(actor: str) -> dict[str, object]:
        return {"at": 0.0, "actor": actor, "action": "a", "status": 200}

    async def written() -> list[str]:
        rows = await database.read(select(audit.c.actor).order_by(audit.c.id))
        return [found["actor"] for found in rows]

    async def all_are_written() -> bool:
        return len(await written()) == 3

    with world.locked():
        database.write_soon(insert(audit), row("first"))
        await database.flush()
        database.write_soon(insert(audit), row("second"))
        with pytest.raises(StorageFailed):
            await database.write(insert(audit), row("told that it failed"))
        database.write_soon(insert(audit), row("third"))
    await until(all_are_written)
    assert await written() == ["first", "second", "third"]


async def test_a_gateway_that_stops_writes_what_it_still_can(world):
    operation = await world.accept(1)
    with world.locked():
        world.journal.end(operation, SMALL)
        await world.database.flush()
    await world.database.close()
    later = World(world.data_dir)
    await later.database.open()
    assert await later.states() == {1: "done"}
    await later.database.close()


async def test_an_operation_whose_end_nobody_recorded_says_so_after_a_restart(world):
    await world.accept(1)
    assert await world.journal.abandon() == 1
    outcome = await world.journal.recall(f"{RUN}:1")
    assert isinstance(outcome, GatewayRestarted)
    assert "recorded" in outcome.message


async def test_a_payload_goes_when_its_operation_was_not_accepted(world):
    with world.locked(), pytest.raises(StorageFailed):
        await world.accept(1, payload=BATCH)
    assert "1" not in world.payloads()
    await world.database.write(
        insert(operations).values(
            run_id=RUN,
            seq_id=2,
            kind="forward",
            state="done",
            request=b"",
            digest=b"",
            accepted_at=0.0,
        )
    )
    with pytest.raises(IntegrityError):
        await world.accept(2, payload=BATCH)
    assert "2" not in world.payloads()


@on_sqlite
async def test_a_database_that_cannot_be_read_is_told_once_in_the_log_and_is_not_ready(
    world, capfd
):
    file, away = world.data_dir / "tandem.db", world.data_dir / "away"
    world.database._engine.dispose()
    file.rename(away)
    file.mkdir()
    for _ in range(3):
        with pytest.raises(StorageFailed, match="SQLITE_CANTOPEN"):
            await world.states()
        with pytest.raises(StorageFailed):
            await world.database.check()
    file.rmdir()
    away.rename(file)
    assert await world.states() == {}
    await world.database.check()
    log = "".join(capfd.readouterr())
    assert (log.count("reads_fail"), log.count("reads_work_again")) == (1, 1)
    assert "unable to open database file" in log
