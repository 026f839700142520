"""What removing old history needs: when sampling sessions ended, the project of usage whose session
is gone, and an index of the results that nobody has fetched."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.add_column("sampling_sessions", sa.Column("ended_at", sa.Float()))
    op.execute("UPDATE sampling_sessions SET ended_at = created_at WHERE state = 'ended'")
    project = sa.Column("project_id", sa.String(200), nullable=False, server_default="")
    op.add_column("usage", project)
    op.create_index(
        "operations_with_result",
        "operations",
        ["ended_at"],
        sqlite_where=sa.text("result IS NOT NULL"),
        postgresql_where=sa.text("result IS NOT NULL"),
    )
