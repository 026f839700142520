"""Paths relative to the data directory, which can be moved from then on.

The folder of a state is the last three parts of its path, also where the directory was moved
before.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from alembic import context, op
from sqlalchemy import text

from gateway.storage.data_directory import relative_path

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    connection, data_dir = op.get_bind(), context.config.attributes["data_dir"]
    op.execute("UPDATE weight_versions SET path = 'weights/' || replace(name, ':', '_')")
    for table in ("checkpoints", "released_folders"):  # both have an index by run
        states = connection.execute(text(f"SELECT run_id, folder FROM {table} WHERE folder <> ''"))
        for run_id, folder in states.all():
            connection.execute(
                text(f"UPDATE {table} SET folder = :new WHERE run_id = :run AND folder = :old"),
                {
                    "run": run_id,
                    "old": folder,
                    "new": "/".join(PurePosixPath(folder).parts[-3:]),
                },
            )
    for name, path in connection.execute(text("SELECT name, path FROM models")).all():
        connection.execute(
            text("UPDATE models SET path = :new WHERE name = :name"),
            {"name": name, "new": relative_path(Path(path), data_dir)},
        )
