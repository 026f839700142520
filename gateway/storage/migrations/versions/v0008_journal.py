"""The journal keeps what a run's trainer is restored from, so that runs outlive the gateway.

The runs of an earlier release have not kept it. They end here, as they did at every restart.
"""

from __future__ import annotations

import time
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"

_REASON = (
    "the gateway was upgraded from a release that could not go on with a run after a restart; "
    "create the run again, from a checkpoint if there is one"
)


def upgrade() -> None:
    columns: list[sa.Column[Any]] = [
        sa.Column("model", sa.JSON()),
        sa.Column("parent", sa.String(200), nullable=False, server_default=""),
        sa.Column("newest", sa.String(200), nullable=False, server_default=""),
        sa.Column("replay_after", sa.BigInteger, nullable=False, server_default="-1"),
    ]
    for column in columns:
        op.add_column("runs", column)
    for name, type_ in (
        ("payload", sa.LargeBinary()),
        ("call", sa.LargeBinary()),
        ("seconds", sa.Float()),
    ):
        op.add_column("operations", sa.Column(name, type_))
    op.create_table(
        "snapshots",
        sa.Column("folder", sa.String(300), primary_key=True),
        sa.Column("run_id", sa.String(100), nullable=False),
        sa.Column("seq_id", sa.BigInteger, nullable=False),
        sa.Column("step", sa.BigInteger, nullable=False),
        sa.Column("bytes", sa.BigInteger, nullable=False),
    )
    op.create_index("snapshots_by_run", "snapshots", ["run_id"])
    _end("runs", state="ended", key="reason", where="state = 'active'")
    _end("operations", state="failed", key="error", where="ended_at IS NULL")


def _end(table: str, *, state: str, key: str, where: str) -> None:
    change = sa.text(
        f"UPDATE {table} SET state = :state, error_type = 'gateway_restarted', {key} = :reason, "
        f"ended_at = :now WHERE {where}"
    )
    op.get_bind().execute(change, {"state": state, "reason": _REASON, "now": time.time()})
