"""Budgets, with a database."""

from __future__ import annotations

import asyncio

import pytest

from gateway.metrics import Metrics
from gateway.owners.budgets import BudgetUse, OwnerBudgets
from gateway.owners.limits import Quotas
from gateway.storage.database import Database
from tandem.errors import StorageFailed
from tandem.settings.requests import LimitSettings
from tests.support.postgres import url_for

pytestmark = pytest.mark.usefixtures("each_database")


@pytest.fixture
async def database(tmp_path):
    database = Database(url=url_for(tmp_path), data_dir=tmp_path)
    await database.open()
    yield database
    await database.close()


@pytest.fixture
async def budgets(database):
    budgets = OwnerBudgets(
        database=database, limits=Quotas(settings=LimitSettings(), metrics=Metrics())
    )
    await budgets.open()
    return budgets


async def change_and_use(budgets, changes, *, anew=False) -> int:
    """Change a budget, and use a token whenever the change waits. Return the used tokens."""
    task = asyncio.create_task(budgets.change("ann", changes, anew=anew))
    await asyncio.sleep(0)
    used = 0
    while not task.done():
        budgets.note_use("ann", device_seconds=0.5, tokens=1)
        used += 1
        await asyncio.sleep(0)
    await task
    assert used
    return used


async def test_a_budget_counts_the_use_while_it_is_written(budgets):
    used = await change_and_use(budgets, {"tokens": 10**9})
    assert budgets.used("ann") == BudgetUse(used / 2, used)
    used += await change_and_use(budgets, {"tokens": 10**10})
    assert budgets.used("ann") == BudgetUse(used / 2, used)
    used = await change_and_use(budgets, {}, anew=True)
    assert budgets.used("ann") == BudgetUse(used / 2, used)
    await change_and_use(budgets, {"tokens": None})
    assert not budgets.has_budget("ann")


async def test_a_budget_that_cannot_be_written_does_not_begin(budgets, database, monkeypatch):
    async def fail(*_: object, **__: object) -> None:
        raise StorageFailed("no disk")

    monkeypatch.setattr(database, "write", fail)
    with pytest.raises(StorageFailed):
        await budgets.change("ann", {"tokens": 5})
    assert not budgets.has_budget("ann")
