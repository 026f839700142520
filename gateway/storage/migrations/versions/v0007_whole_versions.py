"""Weight versions are whole: no base of a delta, and no option for deltas."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007_whole_versions"
down_revision = "0006_playground"


def upgrade() -> None:
    op.drop_column("weight_versions", "delta_of")
    runs = sa.table("runs", sa.column("id"), sa.column("asks", sa.JSON()))
    connection = op.get_bind()
    for row in connection.execute(sa.select(runs.c.id, runs.c.asks)).all():
        if row.asks and "delta" in row.asks:
            asks = {name: value for name, value in row.asks.items() if name != "delta"}
            connection.execute(runs.update().where(runs.c.id == row.id).values(asks=asks))
