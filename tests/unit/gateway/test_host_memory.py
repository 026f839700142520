"""How a worker is put to sleep so that all fit into the host's memory, and an engine's share of a
device."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path

import pytest

from gateway.placement.groups import DeviceGroup
from gateway.placement.lease import Switched
from gateway.placement.memory import HostMemory, Residence, SleepPlan, engine_settings, free_on_disk
from tandem.protocol.devices import parse_device
from tandem.settings.workers import SamplerSettings
from tests.support.virtual_time import run_in_virtual_time

GIB = 2**30
SPILL = Path("/spill")


def residence(kind: str = "trainer", *, on_host: bool = False, **about) -> Residence:
    return Residence(kind=kind, on_host=on_host, present=True, measured=True, **about)


def memory(*there: Residence, budget: int = 100, disk: int = 1000, least_free: int = 10):
    async def free(_: Path) -> int:
        return disk

    found = HostMemory(spill_folder=SPILL, least_free=least_free, free_on_disk=free)
    found.budget = budget
    for each in there:
        found.add(each)
    return found


def reserve(host, one, way, following=None) -> SleepPlan | str:
    return asyncio.run(host.reserve(one, way, following=following))


TO_HOST = [
    # of a budget of 100: on the device, on the host already, others' there -> what it may take
    (40, 0, 0, 70),  # and half of what is left besides
    (40, 0, 60, 40),
    (40, 0, 61, None),
    (40, 40, 60, 40),  # its own pinned memory is used again
    (0, 0, 70, 30),  # nothing is known of it: all that is free
    (0, 0, 100, None),
]


@pytest.mark.parametrize(("device", "own", "others", "most"), TO_HOST)
def test_a_trainer_goes_to_host_memory_as_far_as_the_budget_goes(device, own, others, most):
    one = residence(device_bytes=device, host_bytes=own)
    host = memory(one, residence(host_bytes=others))
    found = reserve(host, one, "host")
    if most is None:
        assert found == host.shortage()
        assert one.reserved_host_bytes == 0
    else:
        assert found == SleepPlan(most_bytes=most)
        assert one.reserved_host_bytes == most
        host.release(one)
        assert host.used == own + others


ENGINES = [
    # of a budget of 100: slept with, said, of the device, others' there -> whether it keeps weights
    (30, 0, 0, 70, True),
    (30, 0, 0, 71, False),
    (0, 30, 80, 70, True),
    (0, 0, 80, 20, True),  # its weights are no larger than the device
    (0, 0, 80, 30, False),
]


@pytest.mark.parametrize(("slept", "said", "device", "others", "keeps"), ENGINES)
def test_an_engine_keeps_weights_that_certainly_fit_and_else_drops_them(
    slept, said, device, others, keeps
):
    one = residence("sampler", host_bytes=slept, host_need=said, device_capacity=device)
    host = memory(one, residence(host_bytes=others))
    assert isinstance(reserve(host, one, "host"), SleepPlan) == keeps
    assert one.ways == ("host", "drop")
    assert reserve(host, one, "drop") == SleepPlan(drop=True)
    assert SleepPlan(drop=True).request().level == 2


def test_two_that_sleep_at_once_are_not_given_the_same_memory():
    one, two = residence(device_bytes=40), residence(device_bytes=40)
    host = memory(one, two)
    assert reserve(host, one, "host") == SleepPlan(most_bytes=70)
    assert reserve(host, two, "host") == host.shortage()
    host.release(one)
    one.fell_asleep("host", Switched(host_bytes=40))
    assert reserve(host, two, "host") == SleepPlan(most_bytes=50)


@pytest.mark.parametrize(
    ("free", "reserved", "most"), [(1000, 0, 515), (50, 0, 40), (49, 0, None), (100, 60, None)]
)
def test_a_file_is_written_where_the_disk_has_room_for_it_beside_others(free, reserved, most):
    one = residence(device_bytes=40)
    host = memory(one, residence(reserved_disk_bytes=reserved), disk=free)
    found = reserve(host, one, "disk")
    if most is None:
        assert "TANDEM_SPILL_DIR" in str(found)
    else:
        assert found == SleepPlan(spill_folder=str(SPILL), most_bytes=most)
        assert one.reserved_disk_bytes == most


def disk_that(answer) -> HostMemory:
    host = HostMemory(spill_folder=SPILL, least_free=0, free_on_disk=lambda _: answer())
    host.add(residence(device_bytes=40))
    return host


def test_a_disk_that_cannot_be_asked_has_no_room_and_the_reason_is_told():
    async def fails() -> int:
        raise OSError(errno.EIO, "Input/output error", "/spill/folder")

    host = disk_that(fails)
    found = reserve(host, host.residences[0], "disk")
    assert found == (
        "the disk for its state cannot be asked: Input/output error (TANDEM_SPILL_DIR)"
    )


def test_a_disk_that_does_not_answer_is_asked_once_until_it_does():
    async def scenario() -> None:
        asked, answers = [], asyncio.Event()

        async def hangs() -> int:
            asked.append(asyncio.get_running_loop().time())
            await answers.wait()
            return 100

        host = disk_that(hangs)
        (one,) = host.residences
        for _ in range(3):
            assert "no answer within 10 s" in str(await host.reserve(one, "disk", following=None))
        assert len(asked) == 1
        answers.set()
        await asyncio.sleep(1)
        assert isinstance(await host.reserve(one, "disk", following=None), SleepPlan)
        assert len(asked) == 2

    run_in_virtual_time(scenario())


@pytest.mark.parametrize(
    ("kind", "slept", "grows", "fits"),
    [
        ("trainer", "host", 40, True),
        ("trainer", "host", 41, False),
        ("sampler", "host", 41, False),
    ],
)
def test_where_memory_is_the_hosts_bytes_count_once_and_the_next_worker_must_fit(
    kind, slept, grows, fits
):
    one = residence(kind, on_host=True, device_bytes=30)
    host = memory(one, residence(on_host=True, device_bytes=30))
    following = Residence(kind="trainer", on_host=True, host_need=grows)
    assert (reserve(host, one, slept, following) == SleepPlan()) == fits
    assert host.used == 60


def test_what_is_to_wake_has_its_memory_reserved_while_nobody_has_heard_of_it():
    one = Residence(kind="trainer", on_host=True, host_need=60)
    two = Residence(kind="trainer", on_host=True, host_need=60)
    host = memory(one, two)
    assert host.reserve_to_wake(one)
    assert not host.reserve_to_wake(two)
    one.started()
    one.woke(Switched(device_bytes=30))
    host.release(one)
    assert host.used == 30
    assert host.reserve_to_wake(two) is True


def test_pinned_memory_is_kept_while_a_worker_is_awake_and_given_back_with_a_file():
    one = residence(device_bytes=40)
    host = memory(one)
    one.fell_asleep("host", Switched(host_bytes=40))
    one.woke(Switched(device_bytes=40))
    assert host.used == 40
    one.fell_asleep("disk", Switched(disk_bytes=40))
    assert (host.used, one.disk_bytes) == (0, 40)
    one.woke(Switched(device_bytes=40))
    assert (host.used, one.disk_bytes) == (0, 0)
    one.ended()
    assert one.device_bytes == 0


def test_without_a_budget_nothing_is_bounded():
    one = residence(device_bytes=40)
    host = memory(one, residence(host_bytes=10**15), budget=0)
    assert reserve(host, one, "host") == SleepPlan()
    assert host.reserve_to_wake(Residence(kind="trainer", on_host=True, host_need=10**15))


def test_the_disk_is_asked_about_a_folder_that_is_not_there_yet(tmp_path):
    assert asyncio.run(free_on_disk(tmp_path / "not" / "there")) > 0


# --- An engine's share of a device ------------------------------------------------------------


def group(*, workers: int = 16, awake: int = 1, device: str = "cuda:0", memory: int = 80 * GIB):
    return DeviceGroup(
        name="g",
        roles=frozenset({"trainer", "sampler"}),
        devices=(parse_device(device),),
        workers=workers,
        awake=awake,
        memory_bytes=memory,
    )


def share(group: DeviceGroup, *others: Residence, need: int = 0, **settings) -> float:
    found = engine_settings(
        SamplerSettings(**settings), group=group, device_need=need, others=others
    )
    return found.gpu_memory_bytes / GIB


def test_an_engine_that_takes_turns_has_the_device_but_for_what_others_leave_there():
    asleep = residence(sleep_way="host")
    assert share(group(workers=1)) == 79, "its own context is outside of its share"
    assert share(group(workers=2)) == 78, "the other one may still come"
    assert share(group(workers=2), asleep) == 78
    assert share(group(workers=16)) == 64
    assert share(group(workers=100)) == 60, "a quarter is left to those that may come, at most"
    assert share(group(workers=100), *[asleep] * 30) == 49
    grown = residence(sleep_way="host", device_bytes=5 * GIB)
    assert share(group(workers=2), grown) == 73, "it sleeps in part"
    assert share(group(workers=2, awake=2)) == 39


def test_what_was_said_or_chosen_counts_before():
    assert share(group(), need=16 * GIB) == 16
    assert share(group(awake=0), need=16 * GIB) == 16
    assert share(group(awake=0)) == 0, "by gpu_memory_utilization"
    assert share(group(), need=16 * GIB, gpu_memory_utilization=0.3) == 0
    assert share(group(), gpu_memory_bytes=8 * GIB) == 8
    assert share(group(device="cpu:0")) == 0
