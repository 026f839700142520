"""Leases on device groups."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    op.create_table(
        "leases",
        sa.Column("worker", sa.String(320), primary_key=True),
        sa.Column("group_name", sa.String(100), nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("owner", sa.String(100), nullable=False),
        sa.Column("held", sa.Boolean, nullable=False),
        sa.Column("token", sa.BigInteger, nullable=False),
        sa.Column("since", sa.Float, nullable=False),
        sa.Column("seconds", sa.Float, nullable=False),
    )
