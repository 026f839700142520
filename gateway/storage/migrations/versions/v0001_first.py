"""The tables of release 0.2. A new database gets its tables from `gateway.storage.tables`."""

from __future__ import annotations

revision = "0001_first"
down_revision = None


def upgrade() -> None:
    """Change nothing: no database has an earlier schema."""
