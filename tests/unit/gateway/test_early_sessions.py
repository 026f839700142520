"""Waits for sampling sessions without a row, and their ends."""

from __future__ import annotations

import asyncio

import pytest

from gateway.sampling import early_sessions
from gateway.sampling.early_sessions import EarlySessions
from tandem.errors import Overloaded, PublishFailed

ID = "s-0123456789ab:sample:3"


async def test_a_request_waits_for_an_expected_session_until_its_operation_ends(monkeypatch):
    early, end = EarlySessions(), asyncio.get_running_loop().create_future()
    early.expect(ID, end)
    assert early.knows(ID)
    waiting = asyncio.create_task(early.until_opened(ID))
    end.set_result(None)
    await waiting
    assert not early.knows(ID)
    monkeypatch.setattr(early_sessions, "_PATIENCE", 0.001)
    early.expect(ID, asyncio.get_running_loop().create_future())
    with pytest.raises(Overloaded, match="ask again"):
        await early.until_opened(ID)


async def test_another_client_waits_for_the_row_and_asks_again_where_the_disk_stands_still(
    monkeypatch,
):
    early = EarlySessions()
    await early.until_recorded(ID)
    early.note_opened(ID, "v1")
    waiting = asyncio.create_task(early.until_recorded(ID))
    early.note_recorded(ID)
    await waiting
    monkeypatch.setattr(early_sessions, "_PATIENCE", 0.001)
    early.note_opened(ID, "v2")
    with pytest.raises(Overloaded, match="the disk"):
        await early.until_recorded(ID)


async def test_a_lost_session_has_its_reason_until_its_session_ends_or_it_is_opened_again():
    early = EarlySessions()
    early.note_opened(ID, "v1")
    assert early.is_open(ID, "v1") and not early.is_open(ID, "v2")
    early.note_lost(ID, PublishFailed("the disk failed"))
    assert (early.why_lost(ID), early.is_open(ID, "v1")) == ("the disk failed", False)
    early.note_opened(ID, "v2")
    early.note_lost(ID, asyncio.CancelledError())
    assert early.why_lost(ID) == "its run has ended"
    early.forget_reasons("s-ba9876543210")
    assert early.knows(ID)
    early.forget_reasons("s-0123456789ab")
    assert not early.knows(ID)
