"""Migrations of the database (alembic), applied when the gateway starts.

`upgrade` brings a database to the newest revision. For one that is up to date, it costs one query.
"""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Connection, inspect, text

from gateway.storage.tables import metadata

_FOLDER = Path(__file__).parent


def upgrade(connection: Connection, *, data_dir: Path) -> None:
    """Create the tables of an empty database, or apply the migrations that an older one misses,
    in one transaction. `data_dir` is for migrations of what is in it."""
    revision = _revision(connection)
    if revision == newest_revision():
        return
    from alembic import command  # takes a third of a second to import
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(_FOLDER))
    config.attributes["connection"] = connection
    config.attributes["data_dir"] = data_dir
    if revision:
        command.upgrade(config, "head")
    else:
        metadata.create_all(connection)
        command.stamp(config, "head")
    connection.commit()


def newest_revision() -> str:
    """Return the revision of the newest migration, which its file names: `v0006_digest.py`."""
    newest = max(path.stem for path in (_FOLDER / "versions").glob("v*.py"))
    return newest.removeprefix("v").partition("_")[0]


def _revision(connection: Connection) -> str:
    if not inspect(connection).has_table("alembic_version"):
        return ""
    return str(connection.execute(text("SELECT version_num FROM alembic_version")).scalar() or "")
