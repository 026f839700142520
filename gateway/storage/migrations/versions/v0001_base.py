"""The revision from which migrations go on. An empty database gets its tables from `tables`."""

from __future__ import annotations

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Do nothing: no database is older."""
