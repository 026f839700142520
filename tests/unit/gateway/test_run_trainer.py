"""A run's trainer: failed restorations."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import pytest

from gateway.metrics import Metrics
from gateway.runs.operations import RunBroken
from gateway.runs.trainer import RunTrainer
from tandem.errors import CustomLossFailed, WorkerDied
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


async def test_a_replay_that_fails_temporarily_ends_no_trainer_of_other_runs(monkeypatch):
    monkeypatch.setattr("gateway.runs.trainer._PAUSE", 0.0)
    run: Any = SimpleNamespace(
        id="s:train:0", session_id="s", recovery=SimpleNamespace(enabled=True), step=1
    )
    host: Any = MagicMock(join=AsyncMock(), end_process=AsyncMock(), hosted={run.id, "t:train:0"})
    host.restoring = asyncio.Lock()
    host.is_at_another.return_value = True
    journal = MagicMock()
    journal.open_log.return_value.first_unanswered = None
    trainer = RunTrainer(
        run=run,
        host=host,
        settings=GatewaySettings(),
        journal=journal,
        snapshots=MagicMock(),
        metrics=Metrics(),
        definition_of=MagicMock(),
        on_lost=MagicMock(),
    )
    monkeypatch.setattr(trainer, "taker", MagicMock(remove_left=AsyncMock()))
    replays = AsyncMock(side_effect=[CustomLossFailed("it took more than 30 s"), 3])
    monkeypatch.setattr(trainer.restoration, "bring_back", replays)
    await trainer._restore(WorkerDied("the trainer died"), None)
    assert trainer.serves
    assert host.join.await_count == 2
    host.end_process.assert_not_awaited()
