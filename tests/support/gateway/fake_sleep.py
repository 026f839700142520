"""What the fake workers have in common: they sleep and wake, and compute nothing asleep."""

from __future__ import annotations

from tandem.errors import CannotSleep
from tandem.v1 import common_pb2

BYTES = 2**20
"""What is on the device awake, and on the host asleep."""


class FakeSleep:
    """`switches` has the directions in which it went. Its host is to do it where it does not
    know how."""

    asleep = False
    knows_how = True

    def __init__(self) -> None:
        self.switches: list[str] = []

    async def Sleep(self, request, context):
        self.asleep = True
        if not self.knows_how:
            return common_pb2.SwitchReply(failure=CannotSleep("it cannot").to_failure())
        self.switches.append("sleep")
        return common_pb2.SwitchReply(bytes_moved=BYTES, host_bytes=BYTES)

    async def Wake(self, request, context):
        self.asleep = False
        if not self.knows_how:
            return common_pb2.SwitchReply(failure=CannotSleep("it cannot").to_failure())
        self.switches.append("wake")
        return common_pb2.SwitchReply(bytes_moved=BYTES, device_bytes=BYTES)

    def check_awake(self) -> None:
        assert not self.asleep, "it was asked to compute while it is asleep"
