"""Migrations of the database (alembic), applied when the gateway starts.

`upgrade` brings a database to the newest revision. For one that is up to date, it costs one query.
"""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Connection, inspect, text

HEAD = "0001"


def upgrade(connection: Connection) -> None:
    """Apply the missing migrations in one transaction."""
    if _revision(connection) == HEAD:
        return
    from alembic import command  # takes a third of a second to import
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent))
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
    connection.commit()


def _revision(connection: Connection) -> str:
    if not inspect(connection).has_table("alembic_version"):
        return ""
    return str(connection.execute(text("SELECT version_num FROM alembic_version")).scalar() or "")
