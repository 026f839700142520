"""Samplers whose engines were counted anew while they live."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"


def upgrade() -> None:
    op.create_table(
        "scaled_samplers",
        sa.Column("sampler", sa.String(300), primary_key=True),
        sa.Column("replicas", sa.Integer, nullable=False),
    )
