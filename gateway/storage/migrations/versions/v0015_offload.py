"""What a run keeps on its host, which was said of its moments alone."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"

_OFFLOAD = {"device": "none", "host": "moments"}


def upgrade() -> None:
    runs = sa.table(
        "runs", sa.column("id", sa.String), *(sa.column(n, sa.JSON) for n in ("training", "asks"))
    )
    connection = op.get_bind()
    for row in connection.execute(sa.select(runs)).mappings().all():
        changed = {
            name: {key: value for key, value in row[name].items() if key != "moments"}
            | {"offload": _OFFLOAD[row[name]["moments"]]}
            for name in ("training", "asks")
            if row[name] and "moments" in row[name]
        }
        if changed:
            connection.execute(sa.update(runs).where(runs.c.id == row["id"]).values(changed))
