"""What tells an operation from another one with its sequence number."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    op.add_column("operations", sa.Column("digest", sa.LargeBinary()))
