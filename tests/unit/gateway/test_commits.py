from __future__ import annotations

import pytest
from sqlalchemy import insert, select
from sqlalchemy.exc import IntegrityError

from gateway.storage.commits import Write, write_batch
from gateway.storage.drivers import make_engine
from gateway.storage.tables import metadata, operations
from tandem.errors import StorageFailed

OPERATION = {
    "run_id": "run",
    "kind": "optim_step",
    "state": "accepted",
    "request": b"{}",
    "digest": b"",
    "accepted_at": 1,
}
ACCEPT = insert(operations)


@pytest.fixture
def connection():
    engine = make_engine("sqlite://")
    metadata.create_all(engine)
    with engine.connect() as connection:
        yield connection
    engine.dispose()


def accepted(*seq_ids: int, **values) -> list[dict]:
    return [OPERATION | {"seq_id": seq_id} | values for seq_id in seq_ids]


def test_a_refused_row_leaves_the_others_and_its_error_shows_no_values(connection):
    batch = [Write([(ACCEPT, accepted(number, payload=b"of a client"))]) for number in (1, 2, 2, 3)]
    first, second, third, fourth = write_batch(connection, batch, epoch=0)
    assert (first, second, fourth) == (None, None, None)
    assert isinstance(third, IntegrityError)
    assert "UNIQUE constraint failed" in str(third)
    assert "of a client" not in str(third)
    assert connection.execute(select(operations.c.seq_id)).scalars().all() == [1, 2, 3]


def test_neighbours_with_other_names_are_written_with_all_their_values(connection):
    batch = [
        Write([(ACCEPT, rows)])
        for rows in (accepted(1), accepted(2, payload=b"large"), accepted(3), accepted(4))
    ]
    assert write_batch(connection, batch, epoch=0) == [None] * len(batch)
    written = connection.execute(select(operations.c.payload)).scalars().all()
    assert written == [None, b"large", None, None]


def test_writes_to_a_damaged_database_blame_the_storage_and_not_their_rows(tmp_path):
    file = tmp_path / "tandem.db"
    engine = make_engine(f"sqlite:///{file}")
    metadata.create_all(engine)
    with engine.connect() as connection:
        root = "SELECT rootpage FROM sqlite_master WHERE name = 'operations'"
        page = connection.exec_driver_sql(root).scalar_one()
        size = connection.exec_driver_sql("PRAGMA page_size").scalar_one()
    engine.dispose()
    with file.open("r+b") as damaged:
        damaged.seek((page - 1) * size)
        damaged.write(b"x" * size)
    with engine.connect() as connection:
        errors = write_batch(connection, [Write([(ACCEPT, accepted(1))])] * 2, epoch=0)
    engine.dispose()
    assert [type(error) for error in errors] == [StorageFailed] * 2
    assert "SQLITE_CORRUPT" in str(errors[0])
