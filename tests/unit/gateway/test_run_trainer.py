"""A run's trainer: failed restorations, and failed ends."""

from __future__ import annotations

import asyncio
import gc
import weakref
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import pytest

from gateway.metrics import Metrics
from gateway.runs.lifecycle import RunLifecycle
from gateway.runs.operations import RunBroken
from gateway.runs.trainer import RunTrainer
from tandem.errors import CustomLossFailed, SessionFinished, WorkerDied
from tandem.settings.gateway import GatewaySettings


def trainer_of(run: Any, **tools: Any) -> tuple[RunTrainer, list[Exception]]:
    """A run's trainer, and the errors that ended the run."""
    ends: list[Exception] = []
    tools = {"settings": GatewaySettings(), "metrics": Metrics(), **tools}
    parts: Any = SimpleNamespace(**tools, snapshots=MagicMock())
    return RunTrainer(run=run, tools=parts, on_lost=ends.append), ends


async def test_a_process_that_ends_after_its_run_was_given_up_harms_no_other_run():
    host: Any = MagicMock(join=AsyncMock(), exited=asyncio.Future())
    run: Any = SimpleNamespace(
        id="s:train:0", session_id="s", log=None, host=host, snapshot_asked="", restoring=""
    )
    trainer, ends = trainer_of(run)
    client = await trainer._join()
    trainer._serve(client)
    trainer.lose(client, WorkerDied("the trainer is broken"))
    await asyncio.sleep(0)
    assert len(ends) == 1
    host.exited.set_result("it ended")
    await asyncio.sleep(0)
    with pytest.raises(RunBroken):
        await trainer.client()
    assert len(ends) == 1


async def test_a_shared_process_does_not_remember_runs_that_have_ended():
    host: Any = MagicMock(join=AsyncMock(), exited=asyncio.Future())
    run: Any = SimpleNamespace(id="s:train:0", session_id="s", log=None, host=host, restoring="")
    trainer, _ = trainer_of(run)
    trainer._serve(await trainer._join())
    await trainer.close()
    ended = weakref.ref(trainer)
    del trainer
    gc.collect()
    assert ended() is None


async def test_a_replay_that_fails_temporarily_ends_no_trainer_of_other_runs(monkeypatch):
    monkeypatch.setattr("gateway.runs.trainer._PAUSE", 0.0)
    host: Any = MagicMock(join=AsyncMock(), end_process=AsyncMock(), exited=asyncio.Future())
    host.hosted = {"s:train:0", "t:train:0"}
    host.restoring = asyncio.Lock()
    host.is_at_another.return_value = True
    log = MagicMock(first_unanswered=None)
    run: Any = SimpleNamespace(
        id="s:train:0", session_id="s", log=log, host=host, step=1, restored=0, restoring=""
    )
    trainer, _ = trainer_of(run)
    monkeypatch.setattr(trainer, "taker", MagicMock(remove_left=AsyncMock()))
    replays = AsyncMock(side_effect=[CustomLossFailed("it took more than 30 s"), 3])
    monkeypatch.setattr(trainer.restoration, "bring_back", replays)
    await trainer._restore(WorkerDied("the trainer died"), None)
    assert trainer.serves
    assert host.join.await_count == 2
    host.end_process.assert_not_awaited()


async def test_the_files_of_a_run_are_removed_though_its_trainer_cannot_be_left():
    hosts: Any = MagicMock(leave=AsyncMock(side_effect=ValueError("a fault")))
    collector: Any = MagicMock(collect=AsyncMock())
    tools: Any = MagicMock()
    tools.snapshots.remove_all = AsyncMock()
    tools.journal.remove_payloads = AsyncMock()
    tools.journal.database.flush = AsyncMock()
    lifecycle = RunLifecycle(hosts=hosts, collector=collector, tools=tools)
    run: Any = MagicMock(id="s:train:0", life=None, stopping=None, error=None, creation=None)
    await lifecycle.end_all([run], SessionFinished("its session has ended"))
    hosts.leave.assert_awaited_once_with(run.host, run.id)
    tools.snapshots.remove_all.assert_awaited_once_with(run)
    tools.journal.remove_payloads.assert_awaited_once_with(run.id)
    collector.collect.assert_awaited_once_with(run.id, ended=True)
