"""Statements that are executed with every operation.

SQLAlchemy looks up and prepares a statement anew at each execution, which takes several times as
long as SQLite does to carry it out. These are compiled once, and go to SQLite's driver as they are.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from sqlalchemy import Connection, Insert, Update
from sqlalchemy.exc import DBAPIError
from sqlalchemy.sql.schema import ScalarElementColumnDefault

Row = Mapping[str, object]
Adapt = Callable[[object], object]


@dataclass(frozen=True)
class _Compiled:
    """`parameters` are, in the order of the SQL, the name of each, what it is where a row does not
    have it, and what makes a value of it that the driver takes."""

    sql: str
    parameters: Sequence[tuple[str, object, Adapt | None]]

    def values_of(self, row: Row) -> tuple[object, ...]:
        return tuple(
            [
                adapt(row.get(name, constant)) if adapt is not None else row.get(name, constant)
                for name, constant, adapt in self.parameters
            ]
        )


class FrequentStatement:
    """An insert or update, with constants for what is the same in all rows. Other databases than
    SQLite get it through SQLAlchemy."""

    def __init__(self, statement: Insert | Update) -> None:
        self.statement = statement
        self._compiled: dict[tuple[str, ...], _Compiled] = {}

    def execute(self, connection: Connection, rows: Sequence[Row]) -> None:
        """Execute it for rows with the same names, in the transaction of the connection."""
        if connection.dialect.name != "sqlite":
            connection.execute(self.statement, rows)
            return
        names = tuple(rows[0])
        compiled = self._compiled.get(names)
        if compiled is None:
            compiled = self._compiled[names] = self._compile(connection, names)
        driver = cast(sqlite3.Connection, connection.connection.dbapi_connection)
        try:
            driver.executemany(compiled.sql, [compiled.values_of(row) for row in rows])
        except sqlite3.Error as error:
            raise DBAPIError.instance(compiled.sql, None, error, sqlite3.Error) from error

    def _compile(self, connection: Connection, names: tuple[str, ...]) -> _Compiled:
        dialect, columns = connection.dialect, self.statement.table.c
        compiled = self.statement.compile(
            dialect=dialect, column_keys=[name for name in names if name in columns]
        )
        constants = dict(compiled.params)
        for column in compiled.insert_prefetch:
            constants[column.key] = cast(ScalarElementColumnDefault, column.default).arg
        return _Compiled(
            sql=str(compiled),
            parameters=[
                (name, constants[name], bound.type.dialect_impl(dialect).bind_processor(dialect))
                for name in compiled.positiontup or ()
                for bound in (compiled.binds[name],)
            ],
        )

    def __str__(self) -> str:
        return str(self.statement)
