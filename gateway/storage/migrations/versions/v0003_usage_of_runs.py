"""The run to which usage belongs, also of samples, whose sampling session is forgotten some day."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    run = sa.Column("run_id", sa.String(100), nullable=False, server_default="")
    op.add_column("usage", run)
    op.execute("UPDATE usage SET run_id = subject WHERE event <> 'sample'")
    op.execute(
        "UPDATE usage SET run_id = COALESCE((SELECT run_id FROM sampling_sessions "
        "WHERE sampling_sessions.id = usage.subject), '') WHERE event = 'sample'"
    )
