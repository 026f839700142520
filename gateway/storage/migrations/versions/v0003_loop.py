"""The loop: bounds of sampling sessions."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003_loop"
down_revision = "0002_record"


def upgrade() -> None:
    op.add_column("sampling_sessions", sa.Column("min_version", sa.BigInteger()))
    op.add_column("sampling_sessions", sa.Column("max_staleness", sa.BigInteger()))
    op.add_column("sampling_sessions", sa.Column("updates", sa.String(8)))
