"""The history of the database's tables (alembic), applied when the gateway starts.

`upgrade` brings a database to the newest revision. It costs one query when it is there already.
"""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Connection, inspect, text

HEAD = "0001"


def upgrade(connection: Connection) -> None:
    """Applies what is missing, in one transaction."""
    if _revision(connection) == HEAD:
        return
    from alembic import command  # costs a third of a second: only where there is work
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
