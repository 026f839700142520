"""Statements that go to SQLite's driver as they are write what they would through SQLAlchemy."""

from __future__ import annotations

import pytest
from sqlalchemy import bindparam, insert, select, update
from sqlalchemy.dialects import sqlite
from sqlalchemy.exc import IntegrityError

from gateway.storage.commits import Write, write_batch
from gateway.storage.drivers import make_engine
from gateway.storage.frequent_statement import FrequentStatement
from gateway.storage.tables import metadata, operations, training_steps

OPERATION = {
    "run_id": "run",
    "kind": "optim_step",
    "state": "accepted",
    "request": b"{}",
    "accepted_at": 1,
}
STEP = {
    "run_id": "run",
    "seq_id": 1,
    "step": 1,
    "at": 1.5,
    "seconds": 2.5,
    "tokens": 3,
    "weight_version": "a\0b",
    "metrics": {"loss": 0.5, "lost": None},
}
END = (
    update(operations)
    .where(operations.c.seq_id == bindparam("this_seq"), operations.c.run_id == "run")
    .values(payload=None)
)


@pytest.fixture
def connection():
    engine = make_engine("sqlite://")
    metadata.create_all(engine)
    with engine.connect() as connection:
        yield connection
    engine.dispose()


def accepted(*seq_ids: int, **values) -> list[dict]:
    return [OPERATION | {"seq_id": seq_id} | values for seq_id in seq_ids]


def written(connection, statements, *, frequent: bool) -> list[tuple]:
    """All rows after the statements, each with its rows, which are rolled back."""
    for statement, rows in statements:
        if frequent:
            FrequentStatement(statement).execute(connection, rows)
        else:
            connection.execute(statement, rows)
    found = [
        tuple(row)
        for table in (operations, training_steps)
        for row in connection.execute(select(table))
    ]
    connection.rollback()
    return found


@pytest.mark.parametrize(
    "statements",
    [
        [(insert(operations), accepted(1, 2, 3))],
        [(insert(operations), accepted(1, error="n\0thing", payload=b"\0\1", call=None))],
        [
            (insert(operations), accepted(1, 2, payload=b"large")),
            (END, [{"this_seq": 2, "state": "failed", "error": "why", "ended_at": 2}]),
        ],
        [(sqlite.insert(training_steps).on_conflict_do_nothing(), [STEP, STEP | {"step": 9}])],
    ],
    ids=["defaults", "types", "constants", "conflicts"],
)
def test_a_frequent_statement_writes_what_sqlalchemy_writes(connection, statements):
    expected = written(connection, statements, frequent=False)
    assert expected
    assert written(connection, statements, frequent=True) == expected


def test_rows_with_other_names_are_another_statement(connection):
    accept = FrequentStatement(insert(operations))
    accept.execute(connection, accepted(1))
    accept.execute(connection, accepted(2, error="why"))
    assert connection.execute(select(operations.c.error)).scalars().all() == ["", "why"]


def test_a_row_that_is_refused_raises_what_sqlalchemy_raises_and_says_no_values(connection):
    accept = FrequentStatement(insert(operations))
    with pytest.raises(IntegrityError, match="UNIQUE constraint failed") as caught:
        accept.execute(connection, accepted(1, 1, payload=b"of a client"))
    assert "of a client" not in str(caught.value)


def test_neighbours_with_other_names_are_written_with_all_that_they_have(connection):
    accept = FrequentStatement(insert(operations))
    batch = [
        Write([(accept, rows)])
        for rows in (accepted(1), accepted(2, payload=b"large"), accepted(3), accepted(4))
    ]
    assert write_batch(connection, batch, epoch=0) == [None] * len(batch)
    assert connection.execute(select(operations.c.payload)).scalars().all() == [
        None,
        b"large",
        None,
        None,
    ]
