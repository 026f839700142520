"""The trials of the playground, and its switch."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006_playground"
down_revision = "0005_jobs"


def upgrade() -> None:
    op.create_table(
        "trials",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("owner", sa.String(100), nullable=False),
        sa.Column("blueprint", sa.String(200), nullable=False),
        sa.Column("model", sa.String(200), nullable=False),
        sa.Column("values", sa.JSON(), nullable=False),
        sa.Column("seed", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("started_at", sa.Float()),
        sa.Column("ends_at", sa.Float()),
        sa.Column("ended_at", sa.Float()),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("key_id", sa.String(64), nullable=False),
        sa.Column("numbers", sa.JSON(), nullable=False),
        sa.Column("violations", sa.JSON(), nullable=False),
        sa.Column("weights", sa.String(400), nullable=False),
    )
    op.create_index("trials_by_state", "trials", ["state"])
    op.create_index("trials_by_owner", "trials", ["owner", "created_at"])
    op.create_table(
        "playground_closed",
        sa.Column("id", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("at", sa.Float(), nullable=False),
    )
