"""Sleep and wake of all ranks: all of them, or none."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from tandem.errors import CannotSleep, TandemError, WorkerDied
from tandem.v1 import common_pb2
from trainer_service.backends.base import TrainerBackend
from trainer_service.checkpoints.storage import together
from trainer_service.compute.control_group import ControlGroup, Op
from trainer_service.compute.offload import Offload


class Switching:
    """Rank 0 calls `sleep` and `wake`, the others `follow`."""

    def __init__(
        self,
        control: ControlGroup,
        backends: Callable[[], Sequence[TrainerBackend]],
        *,
        on_sleep: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_sleep` frees host memory that a sleeping trainer does not need."""
        self._control = control
        self._on_sleep = on_sleep
        self._offload = Offload(backends)
        self._slept = common_pb2.SleepRequest()
        self._suspended = False

    @property
    def asleep(self) -> bool:
        return self._offload.asleep or self._suspended

    def sleep(self, request: common_pb2.SleepRequest) -> common_pb2.SwitchReply:
        """Put all ranks to sleep. Raises `WorkerDied` if they can neither sleep nor stay awake."""
        self._slept = request
        return self._switch(Op.SLEEP)

    def wake(self) -> common_pb2.SwitchReply:
        """Wake all ranks. Raises `WorkerDied` if they can neither wake nor stay asleep."""
        return self._switch(Op.WAKE)

    def follow(self, op: Op, payload: bytes) -> None:
        if op == Op.SLEEP:
            self._slept = common_pb2.SleepRequest.FromString(payload)
        self._control.gather(self._move(op).SerializeToString())

    def _switch(self, op: Op) -> common_pb2.SwitchReply:
        """Switch all ranks. If one fails, the others switch back, and the reply has the failure."""
        began = time.perf_counter()
        try:
            self._offload.check_can_sleep()
        except CannotSleep as error:  # in both cases the caller suspends the process on the host
            if op == Op.WAKE or not self._slept.spill_folder:  # a host writes no file
                self._suspended = op == Op.SLEEP
            return common_pb2.SwitchReply(failure=error.to_failure())
        reply = self._announce(op)
        if reply.HasField("failure"):
            failure = reply.failure
            reply = self._announce(Op.WAKE if op == Op.SLEEP else Op.SLEEP)
            if reply.HasField("failure"):
                raise WorkerDied(
                    f"some ranks are asleep and others are not: {failure.message}, and then: "
                    f"{reply.failure.message}"
                )
            reply.failure.CopyFrom(failure)
        reply.seconds = time.perf_counter() - began
        return reply

    def _announce(self, op: Op) -> common_pb2.SwitchReply:
        """Return the sums of all ranks, with the failure of the first failed one."""
        self._control.broadcast(op, self._slept if op == Op.SLEEP else None)
        parts = self._control.gather(self._move(op).SerializeToString())
        total = common_pb2.SwitchReply()
        for reply in map(common_pb2.SwitchReply.FromString, parts):
            total.bytes_moved += reply.bytes_moved
            total.device_bytes += reply.device_bytes
            total.host_bytes += reply.host_bytes
            total.disk_bytes += reply.disk_bytes
            if reply.HasField("failure") and not total.HasField("failure"):
                total.failure.CopyFrom(reply.failure)
        return total

    def _move(self, op: Op) -> common_pb2.SwitchReply:
        """Do this rank's part. With a spill folder, ranks wait for each other as long as there is
        progress."""
        if not self._slept.spill_folder:
            return self._do(op)
        return together(self._control.group, lambda: self._do(op), progress=self._offload)

    def _do(self, op: Op) -> common_pb2.SwitchReply:
        offload, request = self._offload, self._slept
        try:
            if offload.asleep == (op == Op.SLEEP):
                return offload.switch_reply()
            if op == Op.WAKE:
                return offload.wake()
            self._on_sleep()
            return offload.sleep(
                enough_bytes=-(-request.enough_bytes // self._control.size),
                spill_folder=request.spill_folder,
                most_bytes=-(-request.most_bytes // self._control.size),
            )
        except TandemError as error:
            return common_pb2.SwitchReply(failure=error.to_failure())
