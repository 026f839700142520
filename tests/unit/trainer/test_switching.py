from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tandem.errors import WorkerDied
from tandem.v1 import common_pb2
from tests.support.fake_device import FakeDevice
from trainer_service.backends.base import Capability, LiveState
from trainer_service.compute.control_group import Op
from trainer_service.compute.offload import Offload
from trainer_service.service.switching import Switching

PATIENCE = 30.0


class Line:
    """Carries messages between two ranks of one process."""

    def __init__(self) -> None:
        self.down: queue.Queue[tuple[Op, bytes]] = queue.Queue()
        self.up: queue.Queue[bytes] = queue.Queue()


class Control:
    """One rank's end: the part of a `ControlGroup` that `Switching` needs."""

    size = 2
    group = None

    def __init__(self, rank: int, line: Line) -> None:
        self.rank = rank
        self._line = line

    def broadcast(self, op: Op, message: Any = None) -> None:
        self._line.down.put((op, message.SerializeToString() if message else b""))

    def gather(self, payload: bytes) -> list[bytes]:
        if self.rank == 0:
            return [payload, self._line.up.get(timeout=PATIENCE)]
        self._line.up.put(payload)
        return []


class Backend:
    device = "cpu"
    capabilities = frozenset({Capability.SLEEP})

    def __init__(self) -> None:
        self.tensor = torch.arange(1000.0)
        self.optimizer: list[torch.Tensor] = []

    def live_state(self) -> LiveState:
        return LiveState(optimizer=self.optimizer, gradients=[], parameters=[self.tensor])


class Rank:
    def __init__(self, number: int, line: Line) -> None:
        control: Any = Control(number, line)
        backend: Any = Backend()
        self.backend = backend
        self.tensor = backend.tensor
        self.device = FakeDevice()
        self.switching = Switching(control, lambda: [backend])
        self.offload = Offload(lambda: [backend], memory=self.device)
        self.switching._offload = self.offload

    @property
    def whole(self) -> bool:
        return self.tensor.untyped_storage().nbytes() == 4000 and torch.equal(
            self.tensor, torch.arange(1000.0)
        )


@contextmanager
def two_ranks() -> Iterator[tuple[Rank, Rank]]:
    line = Line()
    ranks = Rank(0, line), Rank(1, line)

    def follow() -> None:
        while (announced := line.down.get(timeout=PATIENCE))[0] != Op.HEARTBEAT:
            ranks[1].switching.follow(*announced)

    other = threading.Thread(target=follow)
    other.start()
    try:
        yield ranks
    finally:
        line.down.put((Op.HEARTBEAT, b""))
        other.join(PATIENCE)


def sleep(rank: Rank, **fields: Any) -> common_pb2.SwitchReply:
    return rank.switching.sleep(common_pb2.SleepRequest(**fields))


def test_the_reply_has_the_sums_of_all_ranks():
    with two_ranks() as (first, second):
        reply = sleep(first)
        assert (reply.bytes_moved, reply.host_bytes, reply.device_bytes) == (8000, 8000, 0)
        assert first.offload.asleep
        assert second.offload.asleep
        reply = first.switching.wake()
        assert (reply.bytes_moved, reply.host_bytes, reply.device_bytes) == (8000, 0, 8000)
        assert first.whole
        assert second.whole


@pytest.mark.parametrize("failing", [0, 1])
def test_one_rank_that_cannot_sleep_keeps_all_awake(failing):
    with two_ranks() as ranks:
        ranks[failing].device.most = 0
        reply = sleep(ranks[0])
        assert reply.failure.type == "out_of_memory"
        assert (reply.host_bytes, reply.device_bytes) == (0, 8000)
        assert not any(rank.offload.asleep for rank in ranks)
        assert all(rank.whole for rank in ranks)


@pytest.mark.parametrize("failing", [0, 1])
def test_one_rank_that_cannot_wake_keeps_all_asleep_until_it_can(tmp_path, failing):
    with two_ranks() as ranks:
        sleep(ranks[0], spill_folder=str(tmp_path))
        moved = ranks[failing].offload._moved
        assert moved is not None
        moved.checksum += 1
        reply = ranks[0].switching.wake()
        assert reply.failure.type == "storage_failed"
        assert (reply.disk_bytes, reply.device_bytes) == (8000, 0)
        assert all(rank.offload.asleep for rank in ranks)
        moved.checksum -= 1
        assert not ranks[0].switching.wake().HasField("failure")
        assert all(rank.whole for rank in ranks)


def test_enough_bytes_are_shared_by_the_ranks():
    with two_ranks() as (first, second):
        for rank in (first, second):
            rank.backend.optimizer.append(torch.zeros(1000))
        reply = sleep(first, enough_bytes=8000)
        assert (reply.host_bytes, reply.device_bytes) == (8000, 8000)
        assert first.whole
        assert second.whole


def test_ranks_that_can_neither_wake_nor_sleep_are_of_no_use(tmp_path, monkeypatch):
    with two_ranks() as (first, second):
        sleep(first, spill_folder=str(tmp_path))
        moved = second.offload._moved
        assert moved is not None
        moved.checksum += 1
        (tmp_path / "file").touch()
        first.switching._slept.spill_folder = str(tmp_path / "file")
        with pytest.raises(WorkerDied, match="some ranks are asleep and others are not"):
            first.switching.wake()


def test_ranks_that_cannot_sleep_are_taken_for_suspended_unless_a_file_is_asked_for(tmp_path):
    cannot: Any = SimpleNamespace(capabilities=frozenset())
    control: Any = Control(0, Line())
    switching = Switching(control, lambda: [cannot])
    for request, asleep in [
        (common_pb2.SleepRequest(spill_folder=str(tmp_path)), False),
        (common_pb2.SleepRequest(), True),
    ]:
        assert switching.sleep(request).failure.type == "cannot_sleep"
        assert switching.asleep == asleep
    assert switching.wake().failure.type == "cannot_sleep"
    assert not switching.asleep
