"""What the database knows of its data directory: its id, and the folders that may be removed."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.add_column("checkpoints", sa.Column("expired_at", sa.Float))
    op.create_index("checkpoints_by_expired", "checkpoints", ["expired_at"])
    op.create_table("data_directory", sa.Column("id", sa.String(32), primary_key=True))
    op.create_table(
        "released_folders",
        sa.Column("folder", sa.Text, nullable=False),
        sa.Column("run_id", sa.String(100), nullable=False),
    )
    op.create_index("released_folders_by_run", "released_folders", ["run_id"])
