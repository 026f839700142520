"""Whole trainings of other frameworks."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005_jobs"
down_revision = "0004_engine_ranges"


def upgrade() -> None:
    op.create_table(
        "jobs",
        sa.Column("run_id", sa.String(100), primary_key=True),
        sa.Column("framework", sa.String(64), nullable=False),
        sa.Column("spec", sa.JSON(), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("restarts", sa.Integer(), nullable=False),
        sa.Column("files_until", sa.Float()),
    )
    op.create_index("jobs_by_files", "jobs", ["files_until"])
