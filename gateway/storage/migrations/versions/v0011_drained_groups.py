"""Device groups that take no more workers."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    op.create_table("drained_groups", sa.Column("name", sa.String(64), primary_key=True))
