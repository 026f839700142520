"""The record of runs: their identity, their parent, and the index of metrics and rollouts."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002_record"
down_revision = "0001_first"


def upgrade() -> None:
    op.add_column("runs", sa.Column("name", sa.String(200)))
    op.add_column("runs", sa.Column("tags", sa.JSON()))
    op.add_column("runs", sa.Column("config", sa.JSON()))
    op.add_column("runs", sa.Column("parent_run", sa.String(100)))
    op.add_column("runs", sa.Column("parent_step", sa.BigInteger()))
    op.add_column("runs", sa.Column("ending", sa.String(8)))
    op.create_table(
        "run_records",
        sa.Column("run_id", sa.String(100), primary_key=True),
        sa.Column("step", sa.BigInteger()),
        sa.Column("first_step", sa.BigInteger()),
        sa.Column("by_user", sa.Boolean(), nullable=False),
        sa.Column("step_at", sa.Float()),
        sa.Column("pace", sa.Float()),
        sa.Column("last", sa.JSON(), nullable=False),
        sa.Column("rows", sa.BigInteger(), nullable=False),
        sa.Column("rollouts", sa.BigInteger(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("dropped", sa.BigInteger(), nullable=False),
        sa.Column("updated_at", sa.Float(), nullable=False),
    )
    op.create_table(
        "owner_limits",
        sa.Column("owner", sa.String(100), primary_key=True),
        sa.Column("limits", sa.JSON(), nullable=False),
        sa.Column("device_seconds", sa.Float()),
        sa.Column("tokens", sa.BigInteger()),
        sa.Column("since", sa.Float(), nullable=False),
        sa.Column("device_seconds_before", sa.Float(), nullable=False),
        sa.Column("tokens_before", sa.BigInteger(), nullable=False),
    )
    op.create_table(
        "rollout_batches",
        sa.Column("run_id", sa.String(100), primary_key=True),
        sa.Column("batch", sa.String(100), primary_key=True),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("file", sa.String(100), nullable=False),
        sa.Column("offset", sa.BigInteger(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("count", sa.BigInteger(), nullable=False),
        sa.Column("rated", sa.BigInteger(), nullable=False),
        sa.Column("reward_min", sa.Float()),
        sa.Column("reward_mean", sa.Float()),
        sa.Column("reward_max", sa.Float()),
    )
    op.create_index("rollout_batches_by_step", "rollout_batches", ["run_id", "step"])
    op.create_table(
        "worker_use",
        sa.Column("key", sa.String(320), primary_key=True),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("session_id", sa.String(64), nullable=False),
        sa.Column("queue_seconds", sa.Float(), nullable=False),
        sa.Column("start_seconds", sa.Float(), nullable=False),
        sa.Column("run_seconds", sa.Float(), nullable=False),
        sa.Column("measured_seconds", sa.Float(), nullable=False),
        sa.Column("cpu_seconds", sa.Float(), nullable=False),
        sa.Column("gpu_measured_seconds", sa.Float(), nullable=False),
        sa.Column("gpu_shared_seconds", sa.Float(), nullable=False),
        sa.Column("gpu_seconds", sa.Float(), nullable=False),
        sa.Column("memory_peak", sa.Float()),
        sa.Column("gpu_peak", sa.Float()),
        sa.Column("gpu_memory_peak", sa.Float()),
    )
    op.create_index("worker_use_by_session", "worker_use", ["session_id"])
    op.create_table(
        "page_sessions",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("key_id", sa.String(32), nullable=False),
        sa.Column("expires_at", sa.Float(), nullable=False),
    )
