"""The first schema: all tables of release 0.2."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001_base"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "audit",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), primary_key=True),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("actor", sa.String(100), nullable=False),
        sa.Column("action", sa.String(64), nullable=False),
        sa.Column("target", sa.String(300), nullable=False),
        sa.Column("address", sa.String(64), nullable=False),
        sa.Column("status", sa.Integer(), nullable=False),
        sa.Column("detail", sa.Text(), nullable=False),
    )
    op.create_index("audit_by_time", "audit", ["at"])
    op.create_table(
        "checkpoints",
        sa.Column("path", sa.String(300), primary_key=True),
        sa.Column("run_id", sa.String(100), nullable=False),
        sa.Column("kind", sa.String(32), nullable=False),
        sa.Column("base_model", sa.String(200), nullable=False),
        sa.Column("folder", sa.Text(), nullable=False),
        sa.Column("version", sa.String(200), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("optimizer", sa.Boolean(), nullable=False),
        sa.Column("owner", sa.String(100), nullable=False),
        sa.Column("public", sa.Boolean(), nullable=False),
        sa.Column("user_metadata", sa.JSON()),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("expires_at", sa.Float()),
        sa.Column("expired_at", sa.Float()),
    )
    op.create_index("checkpoints_by_expired", "checkpoints", ["expired_at"])
    op.create_index("checkpoints_by_expiry", "checkpoints", ["expires_at"])
    op.create_index("checkpoints_by_owner", "checkpoints", ["owner", "created_at"])
    op.create_index("checkpoints_by_run", "checkpoints", ["run_id"])
    op.create_table(
        "custom_losses",
        sa.Column("id", sa.String(100), primary_key=True),
        sa.Column("session_id", sa.String(64), nullable=False),
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("definition", sa.LargeBinary(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
    )
    op.create_index("custom_losses_by_session", "custom_losses", ["session_id"])
    op.create_table(
        "drained_groups",
        sa.Column("name", sa.String(64), primary_key=True),
    )
    op.create_table(
        "keys",
        sa.Column("id", sa.String(32), primary_key=True),
        sa.Column("digest", sa.LargeBinary(), nullable=False),
        sa.Column("owner", sa.String(100), nullable=False),
        sa.Column("role", sa.String(16), nullable=False),
        sa.Column("name", sa.String(100), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("expires_at", sa.Float()),
        sa.Column("revoked_at", sa.Float()),
        sa.Column("last_used_at", sa.Float()),
    )
    op.create_table(
        "leases",
        sa.Column("worker", sa.String(320), primary_key=True),
        sa.Column("group_name", sa.String(100), nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("owner", sa.String(100), nullable=False),
        sa.Column("held", sa.Boolean(), nullable=False),
        sa.Column("token", sa.BigInteger(), nullable=False),
        sa.Column("since", sa.Float(), nullable=False),
        sa.Column("seconds", sa.Float(), nullable=False),
    )
    op.create_table(
        "models",
        sa.Column("name", sa.String(200), primary_key=True),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("max_length", sa.Integer()),
        sa.Column("added_at", sa.Float(), nullable=False),
    )
    op.create_table(
        "operations",
        sa.Column("run_id", sa.String(100), primary_key=True),
        sa.Column("seq_id", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("kind", sa.String(32), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("request", sa.LargeBinary(), nullable=False),
        sa.Column("payload", sa.LargeBinary()),
        sa.Column("call", sa.LargeBinary()),
        sa.Column("digest", sa.LargeBinary(), nullable=False),
        sa.Column("accepted_at", sa.Float(), nullable=False),
        sa.Column("ended_at", sa.Float()),
        sa.Column("error_type", sa.String(64), nullable=False),
        sa.Column("error", sa.Text(), nullable=False),
        sa.Column("seconds", sa.Float()),
        sa.Column("media", sa.String(16), nullable=False),
        sa.Column("result", sa.LargeBinary()),
    )
    op.create_index("operations_by_end", "operations", ["ended_at"])
    op.create_index(
        "operations_with_result",
        "operations",
        ["ended_at"],
        sqlite_where=sa.text("result IS NOT NULL"),
        postgresql_where=sa.text("result IS NOT NULL"),
    )
    op.create_table(
        "places",
        sa.Column("key", sa.String(300), primary_key=True),
        sa.Column("role", sa.String(16), nullable=False),
        sa.Column("group_name", sa.String(64), nullable=False),
        sa.Column("devices", sa.Text(), nullable=False),
        sa.Column("owner", sa.String(100), nullable=False),
        sa.Column("session_id", sa.String(64), nullable=False),
        sa.Column("ranks", sa.Integer(), nullable=False),
        sa.Column("memory", sa.BigInteger(), nullable=False),
        sa.Column("host_memory", sa.BigInteger(), nullable=False),
        sa.Column("keeps", sa.String(300), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
    )
    op.create_table(
        "released_folders",
        sa.Column("folder", sa.Text(), nullable=False),
        sa.Column("run_id", sa.String(100), nullable=False),
    )
    op.create_index("released_folders_by_run", "released_folders", ["run_id"])
    op.create_table(
        "runs",
        sa.Column("id", sa.String(100), primary_key=True),
        sa.Column("session_id", sa.String(64), nullable=False),
        sa.Column("base_model", sa.String(200), nullable=False),
        sa.Column("training", sa.JSON(), nullable=False),
        sa.Column("asks", sa.JSON()),
        sa.Column("host", sa.String(100), nullable=False),
        sa.Column("owner", sa.String(100), nullable=False),
        sa.Column("project_id", sa.String(200), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("error_type", sa.String(64), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("user_metadata", sa.JSON()),
        sa.Column("model", sa.JSON()),
        sa.Column("parent", sa.String(200), nullable=False),
        sa.Column("newest", sa.String(200), nullable=False),
        sa.Column("replay_after", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("ended_at", sa.Float()),
    )
    op.create_index("runs_by_owner", "runs", ["owner", "created_at"])
    op.create_index("runs_by_session", "runs", ["session_id"])
    op.create_index("runs_by_state", "runs", ["state"])
    op.create_table(
        "sampling_sessions",
        sa.Column("id", sa.String(100), primary_key=True),
        sa.Column("session_id", sa.String(64), nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("base_model", sa.String(200), nullable=False),
        sa.Column("model_path", sa.Text(), nullable=False),
        sa.Column("run_id", sa.String(100), nullable=False),
        sa.Column("version", sa.String(205), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("clients", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("ended_at", sa.Float()),
    )
    op.create_index("sampling_sessions_by_session", "sampling_sessions", ["session_id", "state"])
    op.create_table(
        "scaled_samplers",
        sa.Column("sampler", sa.String(300), primary_key=True),
        sa.Column("replicas", sa.Integer(), nullable=False),
    )
    op.create_table(
        "sessions",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("reason", sa.String(32), nullable=False),
        sa.Column("detail", sa.Text(), nullable=False),
        sa.Column("display_name", sa.Text()),
        sa.Column("user_metadata", sa.JSON()),
        sa.Column("tags", sa.JSON()),
        sa.Column("project_id", sa.String(200), nullable=False),
        sa.Column("owner", sa.String(100), nullable=False),
        sa.Column("sdk_version", sa.String(64), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("ended_at", sa.Float()),
    )
    op.create_index("sessions_by_owner", "sessions", ["owner", "created_at"])
    op.create_index("sessions_by_project", "sessions", ["project_id"])
    op.create_index("sessions_by_state", "sessions", ["state"])
    op.create_table(
        "snapshots",
        sa.Column("folder", sa.String(300), primary_key=True),
        sa.Column("run_id", sa.String(100), nullable=False),
        sa.Column("seq_id", sa.BigInteger(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
    )
    op.create_index("snapshots_by_run", "snapshots", ["run_id"])
    op.create_table(
        "training_steps",
        sa.Column("run_id", sa.String(100), primary_key=True),
        sa.Column("seq_id", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("seconds", sa.Float(), nullable=False),
        sa.Column("tokens", sa.BigInteger(), nullable=False),
        sa.Column("weight_version", sa.String(200), nullable=False),
        sa.Column("metrics", sa.JSON(), nullable=False),
    )
    op.create_table(
        "usage",
        sa.Column("hour", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("event", sa.String(32), primary_key=True),
        sa.Column("subject", sa.String(100), primary_key=True),
        sa.Column("run_id", sa.String(100), nullable=False),
        sa.Column("session_id", sa.String(64), nullable=False),
        sa.Column("project_id", sa.String(200), nullable=False),
        sa.Column("owner", sa.String(100), nullable=False),
        sa.Column("base_model", sa.String(200), nullable=False),
        sa.Column("count", sa.BigInteger(), nullable=False),
        sa.Column("input_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cached_tokens", sa.BigInteger(), nullable=False),
        sa.Column("output_tokens", sa.BigInteger(), nullable=False),
        sa.Column("accelerator_seconds", sa.Float(), nullable=False),
    )
    op.create_index("usage_by_session", "usage", ["session_id"])
    op.create_table(
        "weight_versions",
        sa.Column("name", sa.String(200), primary_key=True),
        sa.Column("run_id", sa.String(100), nullable=False),
        sa.Column("base_model", sa.String(200), nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("parent", sa.String(200), nullable=False),
        sa.Column("delta_of", sa.String(200), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("adapter", sa.Boolean(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("collected_at", sa.Float()),
    )
    op.create_index("weight_versions_by_run", "weight_versions", ["run_id"])
    op.create_table(
        "workers",
        sa.Column("id", sa.String(100), primary_key=True),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("session_id", sa.String(64), nullable=False),
        sa.Column("run_id", sa.String(100), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("pid", sa.Integer(), nullable=False),
        sa.Column("started_at", sa.Float(), nullable=False),
        sa.Column("ended_at", sa.Float()),
    )
    op.create_index("workers_by_state", "workers", ["state"])
