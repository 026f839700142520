from __future__ import annotations

import asyncio
import gc
import threading

import grpc.aio


def pollers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if "_poll_wrapper" in thread.name]


def test_grpc_goes_on_polling_after_its_last_channel():
    async def open_and_close() -> None:
        async with grpc.aio.insecure_channel("127.0.0.1:1"):
            pass

    before = pollers()
    asyncio.run(open_and_close())
    gc.collect()
    assert len(before) == 1 and pollers() == before
