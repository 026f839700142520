"""One table of workers, and the changes of their states.

Workers of an earlier schema have no row. The gateway stops them, and restores their runs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002_workers"
down_revision = "0001_base"


_REPLACED = ("workers", "leases", "places", "scaled_samplers")


def upgrade() -> None:
    for table in _REPLACED:  # with their indexes
        op.drop_table(table)
    op.create_table(
        "worker_events",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), primary_key=True),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("key", sa.String(320), nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("owner", sa.String(100), nullable=False),
        sa.Column("session_id", sa.String(64), nullable=False),
        sa.Column("group_name", sa.String(100), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("busy_seconds", sa.Float(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
    )
    op.create_index("worker_events_by_session", "worker_events", ["session_id"])
    op.create_index("worker_events_by_time", "worker_events", ["at"])
    op.create_table(
        "workers",
        sa.Column("key", sa.String(320), primary_key=True),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("owner", sa.String(100), nullable=False),
        sa.Column("session_id", sa.String(64), nullable=False),
        sa.Column("request", sa.JSON(), nullable=False),
        sa.Column("group_name", sa.String(100), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("token", sa.BigInteger(), nullable=False),
        sa.Column("process", sa.String(400), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("since", sa.Float(), nullable=False),
        sa.Column("holders", sa.JSON(), nullable=False),
        sa.Column("ends_as", sa.String(16), nullable=False),
        sa.Column("overtaken", sa.Integer(), nullable=False),
    )
