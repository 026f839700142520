"""Ranges of the engines of scaled samplers."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004_engine_ranges"
down_revision = "0003_loop"


def upgrade() -> None:
    op.add_column("sessions", sa.Column("engine_ranges", sa.JSON()))
