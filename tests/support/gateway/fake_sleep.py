"""Sleep and wake of the fake workers. They compute nothing while asleep."""

from __future__ import annotations

from tandem.errors import CannotSleep
from tandem.v1 import common_pb2

BYTES = 2**20
"""The bytes on the device while awake, and on the host while asleep."""


class FakeSleep:
    """Records its `switches`. Without `knows_how`, the host must suspend it."""

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
        version = request.version if request.HasField("version") else None
        return common_pb2.SwitchReply(bytes_moved=BYTES, device_bytes=BYTES, version=version)

    def check_awake(self) -> None:
        assert not self.asleep, "it was asked to compute while it is asleep"
