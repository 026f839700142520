"""Makes, lists, expires and finds checkpoints of a gateway under test."""

from __future__ import annotations

from pathlib import Path

import pytest
import tinker
from sqlalchemy import update
from tinker import types

from gateway.storage.tables import checkpoints
from tests.support.files import entries


def step(training, times: int = 1) -> None:
    for _ in range(times):
        training.optim_step(types.AdamParams()).result()


def place(gate, run_id: str, root: str = "checkpoints") -> list[Path]:
    folder = gate.settings.data_dir / root / run_id.replace(":", "_")
    return entries(folder)


def expire(gate, path: str) -> None:
    """Put a checkpoint's expiry and grace period into the past."""
    gate.run(
        gate.gateway.database.write(
            update(checkpoints)
            .where(checkpoints.c.path == path)
            .values(expires_at=1.0, expired_at=1.0)
        )
    )


def listed(rest, run_id: str) -> dict[str, tinker.types.Checkpoint]:
    return {c.tinker_path: c for c in rest.list_checkpoints(run_id).result().checkpoints}


def error_of(future) -> str:
    with pytest.raises(tinker.RequestFailedError) as caught:
        future.result()
    return str(caught.value)
