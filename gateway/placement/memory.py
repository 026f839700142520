"""The memory of the host: how a worker is put to sleep, so that all of them fit."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.v1 import common_pb2

_DROP_WEIGHTS = 2


@dataclass(frozen=True)
class SleepPlan:
    """How a worker is put to sleep: its state goes to host memory, unless an engine is to `drop`
    its weights, or a trainer to write a file in `spill_folder`. It frees `enough_bytes` of device
    memory, 0: all, and may take `most_bytes` where it goes to, 0: any number."""

    drop: bool = False
    spill_folder: str = ""
    enough_bytes: int = 0
    most_bytes: int = 0

    def request(self) -> common_pb2.SleepRequest:
        return common_pb2.SleepRequest(
            enough_bytes=self.enough_bytes,
            spill_folder=self.spill_folder,
            level=_DROP_WEIGHTS if self.drop else 0,
            most_bytes=self.most_bytes,
        )


TO_HOST_MEMORY = SleepPlan()
