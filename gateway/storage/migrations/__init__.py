"""Migrations of the database (alembic), applied when the gateway starts.

A new database gets all tables of `gateway/storage/tables.py` at once, an older one is migrated.
Each change of the tables after a release is one file `versions/vNNNN_SUBJECT.py` with the revision
`NNNN_SUBJECT`."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Connection, inspect, text

from gateway.storage.tables import metadata
from tandem.errors import UnknownSchema

_FOLDER = Path(__file__).parent


def upgrade(connection: Connection) -> None:
    """Create the tables, or apply the missing migrations, in one transaction. Raises
    `UnknownSchema` for an unknown revision."""
    revision = revision_of(connection)
    if revision == newest_revision():
        return
    check_revision(revision, "the database")
    from alembic import command  # takes a third of a second to import
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(_FOLDER))
    config.attributes["connection"] = connection
    if connection.dialect.name == "sqlite":  # whose driver would commit each statement
        connection.exec_driver_sql("BEGIN IMMEDIATE")
    if revision:
        command.upgrade(config, "head")
    else:
        metadata.create_all(connection)
        command.stamp(config, "head")
    connection.commit()


def revision_of(connection: Connection) -> str:
    """Return a database's revision, "" if it is empty."""
    if not inspect(connection).has_table("alembic_version"):
        return ""
    return str(connection.execute(text("SELECT version_num FROM alembic_version")).scalar() or "")


def newest_revision() -> str:
    return _revisions()[-1]


def check_revision(revision: str, database: str) -> None:
    """Raise `UnknownSchema` for an unknown revision. An empty database has the revision ""."""
    if revision and revision not in _revisions():
        raise UnknownSchema(
            f"{database} has the schema {revision!r}, which this release of Tandem does not know: "
            "another version made it, a newer one or one that was never released. Use that version "
            "again, or give this one an empty database and data directory (TANDEM_DATABASE_URL, "
            "TANDEM_DATA_DIR) and create the runs again"
        )


def _revisions() -> list[str]:
    return sorted(path.stem.removeprefix("v") for path in (_FOLDER / "versions").glob("v*.py"))
