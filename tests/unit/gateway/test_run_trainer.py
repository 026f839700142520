"""A run's trainer whose restoration was given up."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from gateway.metrics import Metrics
from gateway.runs.operations import RunBroken
from gateway.runs.trainer import RunTrainer
from tandem.errors import WorkerDied
from tandem.settings.gateway import GatewaySettings


async def test_a_process_that_ends_after_its_run_was_given_up_harms_no_other_run():
    run: Any = SimpleNamespace(
        id="s:train:0", session_id="s", recovery=SimpleNamespace(enabled=False)
    )
    told: dict[str, Any] = {}

    async def join(_run, *, on_exit):
        told["exit"] = on_exit
        return MagicMock()

    host: Any = MagicMock(join=join)
    ends: list[Exception] = []
    trainer = RunTrainer(
        run=run,
        host=host,
        settings=GatewaySettings(),
        journal=MagicMock(),
        snapshots=MagicMock(),
        metrics=Metrics(),
        definition_of=MagicMock(),
        on_lost=ends.append,
    )
    client = await trainer._join()
    trainer._serve(client)
    trainer.lose(client, WorkerDied("the trainer is broken"))
    await asyncio.sleep(0)
    assert len(ends) == 1
    told["exit"]("it ended")
    with pytest.raises(RunBroken):
        await trainer.client()
