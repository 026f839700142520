"""The optimizer steps of training runs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    op.create_table(
        "training_steps",
        sa.Column("run_id", sa.String(100), primary_key=True),
        sa.Column("seq_id", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("seconds", sa.Float(), nullable=False),
        sa.Column("tokens", sa.BigInteger(), nullable=False),
        sa.Column("weight_version", sa.String(200), nullable=False),
        sa.Column("metrics", sa.JSON(), nullable=False),
    )
