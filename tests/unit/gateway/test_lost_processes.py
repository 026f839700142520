"""Processes of which neither they nor their launcher say whether they run: in virtual time."""

from __future__ import annotations

import asyncio
import time

import pytest

from tandem.errors import WorkerMayRun
from tests.support.gateway.sampler_world import World
from tests.support.virtual_time import now


@pytest.fixture
def world(tmp_path) -> World:
    return World(tmp_path, {})


async def stop(worker_id, *, at_once=False):
    await asyncio.sleep(1)
    raise WorkerMayRun("the agent does not answer")


def test_a_gateway_starts_though_a_process_without_a_row_cannot_be_stopped_yet(world, monkeypatch):
    async def scenario():
        world.left("sampler-s-1-x")
        world.table.rows.clear()
        with monkeypatch.context() as patched:
            patched.setattr(world.launcher, "stop", stop)
            await world.open()
            assert now() < 15
            assert world.running() == ["sampler-s-1-x"]
        await asyncio.sleep(10)
        assert world.running() == []

    world.run(scenario())


def test_a_process_without_a_row_is_stopped_once_more_after_a_stop_that_hung(world, monkeypatch):
    async def hang(worker_id, *, at_once=False):
        await asyncio.Event().wait()

    async def scenario():
        world.left("sampler-s-1-x")
        world.table.rows.clear()
        with monkeypatch.context() as patched:
            patched.setattr(world.launcher, "stop", hang)
            await world.open()
        await asyncio.sleep(300)
        assert world.running() == []

    world.run(scenario())


def test_a_silent_process_keeps_its_devices_until_its_launcher_answers(world, monkeypatch):
    async def scenario():
        world.left().frozen = True
        await world.open()
        (row,) = world.supervisor.roster.rows.values()
        with monkeypatch.context() as patched:
            patched.setattr(world.launcher, "stop", stop)
            patched.setattr(world.launcher, "reports", False)
            world.supervisor.note_launcher(world.launcher.name, answers=False)
            world.adapter.worker(row.key).silent_since = time.monotonic() - 100
            world.supervisor.poke()
            await asyncio.sleep(100)
            assert world.running() == [row.process]
            assert world.supervisor.roster.rows[row.key].state == "lost"
        world.supervisor.note_launcher(world.launcher.name, answers=True)
        await asyncio.sleep(60)  # the process is asked once more
        assert world.running() == []

    world.run(scenario())
