"""Weight versions that are deltas of others."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"


def upgrade() -> None:
    op.add_column(
        "weight_versions",
        sa.Column("delta_of", sa.String(200), nullable=False, server_default=""),
    )
