"""What runs ask for, and the places of their workers on device groups."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    op.add_column("runs", sa.Column("asks", sa.JSON()))
    op.create_table(
        "places",
        sa.Column("key", sa.String(300), primary_key=True),
        sa.Column("role", sa.String(16), nullable=False),
        sa.Column("group_name", sa.String(64), nullable=False),
        sa.Column("devices", sa.Text, nullable=False),
        sa.Column("owner", sa.String(100), nullable=False),
        sa.Column("session_id", sa.String(64), nullable=False),
        sa.Column("ranks", sa.Integer, nullable=False),
        sa.Column("memory", sa.BigInteger, nullable=False),
        sa.Column("host_memory", sa.BigInteger, nullable=False),
        sa.Column("keeps", sa.String(300), nullable=False, server_default=""),
        sa.Column("created_at", sa.Float, nullable=False),
    )
