from __future__ import annotations

from types import SimpleNamespace

import grpc
import pytest

from tandem.protocol.epoch import (
    EPOCH_METADATA_KEY,
    NEWEST_EPOCH_METADATA_KEY,
    EpochInterceptor,
)


class Refused(Exception):
    pass


class Context:
    async def abort(self, code, details, trailing_metadata):
        raise Refused(code, details, dict(trailing_metadata))


async def heard(door: EpochInterceptor, epoch: int | None) -> bool:
    """Whether a gateway's call with this epoch passes. None: the caller has no epoch."""
    passed = []

    async def handle(_details) -> None:
        passed.append(epoch)

    metadata = () if epoch is None else ((EPOCH_METADATA_KEY, str(epoch)),)
    refusal = await door.intercept_service(handle, SimpleNamespace(invocation_metadata=metadata))
    if refusal is not None:
        with pytest.raises(Refused) as caught:
            await refusal.stream_unary(iter(()), Context())
        code, details, trailing = caught.value.args
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert trailing[NEWEST_EPOCH_METADATA_KEY] in details
        assert f"this one (epoch {epoch})" in details
    return bool(passed)


async def test_the_first_call_of_a_later_gateway_shuts_the_earlier_ones_out():
    door = EpochInterceptor()
    epochs = [3, 3, 2, 5, 4, 3, 5]
    assert [await heard(door, epoch) for epoch in epochs] == [
        True, True, False, True, False, False, True
    ]  # fmt: skip


async def test_what_is_no_gateways_call_passes_and_changes_nothing():
    door = EpochInterceptor()
    assert await heard(door, 7)
    assert await heard(door, None)
    assert not await heard(door, 6)
    assert await heard(door, 7)
