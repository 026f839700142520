"""Connections to SQLite and PostgreSQL, and the classification of their errors."""

from __future__ import annotations

import errno
import json
import sqlite3
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from sqlalchemy import Engine, create_engine, event, make_url
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import (
    ArgumentError,
    DataError,
    DBAPIError,
    NotSupportedError,
    OperationalError,
    ProgrammingError,
)

from tandem.errors import InvalidRequest, StorageFailed, StorageFull

if TYPE_CHECKING:
    import psycopg

_TIMEOUTS = "-c lock_timeout=10000 -c idle_in_transaction_session_timeout=5000"
"""Milliseconds. The second timeout stops a frozen gateway from keeping the leader's row locked."""
_POSTGRESQL = {
    "fallback_application_name": "tandem",
    "client_encoding": "utf8",
    "connect_timeout": 10,
    "tcp_user_timeout": 20_000,  # gives up on a server that stopped acknowledging
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
}
_SQLITE_FULL = frozenset({sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_SHMSIZE})
_SQLITE_DAMAGED = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
_POSTGRESQL_FULL = "53100"  # disk_full
_FAULT_OF_THE_ROW = ("21", "22", "23", "42", "44", "54", "0A")
"""PostgreSQL's error classes that blame the row or the statement. All others blame the server."""


def is_postgresql(url: str) -> bool:
    return url.partition(":")[0].partition("+")[0] in ("postgresql", "postgres")


def restored_copy(database: Path) -> Path:
    """Return where `tandem restore` puts its copy of a database until the old one is away."""
    return database.with_name(f".partial-{database.name}")


def make_engine(url: str) -> Engine:
    """Return the engine of a `sqlite:` or `postgresql:` URL. Raise `InvalidRequest` for another
    URL, and for a SQLite database whose restore was interrupted."""
    wanted = "it must be postgresql://USER:PASSWORD@HOST/NAME or sqlite:///FILE"
    try:
        given = make_url(url)
    except ArgumentError as error:
        raise InvalidRequest(f"TANDEM_DATABASE_URL is not a URL; {wanted}") from error
    connect = partial(create_engine, json_serializer=_to_json, hide_parameters=True)
    match given.get_backend_name():
        case "sqlite":
            file = Path(given.database or "")
            if file.name and restored_copy(file).exists() and not file.exists():
                raise InvalidRequest(
                    f"a restore of {file.name} was interrupted; repeat `tandem restore FOLDER`"
                )
            engine = connect(given)
            event.listen(engine, "connect", _prepare_sqlite)
        case "postgresql" | "postgres":
            options = {"options": f"{given.query.get('options', '')} {_TIMEOUTS}"}
            given = given.set(drivername="postgresql+psycopg").update_query_dict(options)
            try:
                engine = connect(given, connect_args=_POSTGRESQL, pool_pre_ping=True)
            except ModuleNotFoundError as error:
                raise InvalidRequest(
                    "TANDEM_DATABASE_URL names PostgreSQL, whose driver is not installed; "
                    "install it with `pip install 'tandem[postgres]'`"
                ) from error
            event.listen(engine, "connect", _check_postgresql, insert=True)
        case other:
            raise InvalidRequest(f"TANDEM_DATABASE_URL names a database {other!r}; {wanted}")
    return engine


def _check_postgresql(connection: DBAPIConnection, _record: object) -> None:
    """Raise `InvalidRequest` unless the database is UTF-8. Runs before SQLAlchemy's own queries,
    because the driver returns bytes for SQL_ASCII."""
    encoding = cast("psycopg.Connection", connection).info.parameter_status("server_encoding")
    if encoding != "UTF8":
        connection.close()
        raise InvalidRequest(
            f"the database of TANDEM_DATABASE_URL has the encoding {encoding}, and must have UTF8: "
            "name one that was made with `createdb --encoding=UTF8 --template=template0`"
        )


def _prepare_sqlite(connection: DBAPIConnection, _record: object) -> None:
    cursor = connection.cursor()
    for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "busy_timeout=10000"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _to_json(value: object) -> str:
    """Refuse NaN in SQLite too, because PostgreSQL's JSON has none."""
    return json.dumps(value, allow_nan=False)


def typed(error: Exception) -> Exception:
    """Return the exception to raise for a database or file error: the error itself if the row is to
    blame, else a sentence for clients without SQL, values or paths."""
    if isinstance(error, OSError):
        full, why = error.errno in (errno.ENOSPC, errno.EDQUOT), error.strerror
    elif isinstance(error, DBAPIError) and isinstance(error.orig, sqlite3.Error):
        code: int = getattr(error.orig, "sqlite_errorcode", 0)
        damaged = code & 0xFF in _SQLITE_DAMAGED  # without the extension, as of SQLITE_CORRUPT_VTAB
        at_fault = isinstance(error, OperationalError) and code != sqlite3.SQLITE_ERROR
        if not damaged and not at_fault:  # an invalid row or statement
            return error
        full, why = code in _SQLITE_FULL, getattr(error.orig, "sqlite_errorname", None)
    elif isinstance(error, DBAPIError):
        state: str | None = getattr(error.orig, "sqlstate", None)
        if state is None and isinstance(error, DataError | NotSupportedError | ProgrammingError):
            return error  # raised by the driver before it asks the server
        if state is not None and state.startswith(_FAULT_OF_THE_ROW):
            return error
        full, why = state == _POSTGRESQL_FULL, state or "no connection"
    else:
        return error
    failure = StorageFailed(
        f"the gateway cannot use its storage now ({why or type(error).__name__}); try again. If it "
        "lasts, the operator finds the cause in the gateway's log"
    )
    if full:
        failure = StorageFull(
            "the disk or the database of the gateway is full, and nothing was changed; try again "
            "after the operator has freed space"
        )
    failure.__cause__ = error
    return failure


def cause_of(failure: StorageFailed) -> str:
    return str(getattr(failure.__cause__, "orig", failure.__cause__))
