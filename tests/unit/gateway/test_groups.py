"""The device groups that are declared, and those that follow from what the host has."""

from __future__ import annotations

import pytest

from gateway.placement.groups import groups_of
from tandem.agent.host import Accelerator, Host
from tandem.errors import InvalidRequest
from tandem.protocol.devices import Device, parse_device
from tandem.settings.gateway import GatewaySettings

GIB = 2**30


def host(*, gpus: int = 0, cores: int = 4) -> Host:
    found = (Accelerator(n, f"GPU-{n}", "H100", 80 * GIB) for n in range(gpus))
    return Host("box", tuple(range(cores)), 64 * GIB, tuple(found))


def declared(*groups: dict[str, object], **settings: object) -> GatewaySettings:
    return GatewaySettings(groups=list(groups), **settings)


TRAIN = {"name": "train", "devices": ["cpu:0"], "roles": ["trainer"]}
SAMPLE = {"name": "sample", "devices": ["cpu:1"], "roles": ["sampler"]}


def test_declared_groups_have_their_devices_and_the_defaults():
    train, sample = groups_of(declared(TRAIN, SAMPLE), host())
    assert (train.name, train.devices, train.roles) == (
        "train",
        (parse_device("cpu:0"),),
        {"trainer"},
    )
    assert (train.awake, train.workers, train.memory_bytes, train.leased) == (1, 16, 0, True)
    assert sample.roles == {"sampler"}


def test_an_nvidia_device_is_known_by_its_uuid_and_its_memory():
    (group,) = groups_of(
        declared({"name": "g", "devices": ["cuda:1"], "roles": ["trainer", "sampler"]}),
        host(gpus=2),
    )
    assert group.devices == (Device("cuda", cuda="GPU-1"),)
    assert group.memory_bytes == 80 * GIB


def test_an_nvidia_device_is_known_by_the_beginning_of_its_uuid():
    both = ["trainer", "sampler"]
    (group,) = groups_of(
        declared({"name": "g", "devices": ["cuda:GPU-1"], "roles": both}), host(gpus=2)
    )
    assert group.devices == (Device("cuda", cuda="GPU-1"),)
    alike = tuple(Accelerator(n, f"GPU-1{n}", "H100", 80 * GIB) for n in range(2))
    with pytest.raises(InvalidRequest, match=r"GPU-1 is ambiguous: cuda:0 .* and cuda:1 "):
        groups_of(
            declared({"name": "g", "devices": ["cuda:GPU-1"], "roles": both}),
            Host("box", (0,), GIB, alike),
        )


@pytest.mark.parametrize(
    ("groups", "fault"),
    [
        ([TRAIN], 'no group has "sampler" among its roles'),
        ([SAMPLE], 'no group has "trainer" among its roles'),
        ([TRAIN, TRAIN | {"devices": ["cpu:2"]}, SAMPLE], "2 groups have the name 'train'"),
        (
            [TRAIN, SAMPLE | {"devices": ["cpu:0-1"]}],
            "core 0 is in the groups 'train' and 'sample'",
        ),
        ([TRAIN | {"devices": ["cpu:0-1", "cpu:1"]}, SAMPLE], "group 'train' names a device twice"),
        ([TRAIN | {"devices": ["cpu:3-5"]}, SAMPLE], "the host has cpu:0-3, and no cpu:4-5"),
        (
            [TRAIN | {"devices": ["cuda:7"]}, SAMPLE],
            "cuda:7 is not there: the host has cuda:0 (GPU-0)",
        ),
        ([TRAIN | {"devices": ["cuda:MIG-7"]}, SAMPLE], "cuda:MIG-7 is a MIG instance: Tandem"),
        ([TRAIN | {"devices": ["tpu:0"]}, SAMPLE], "group 'train': 'tpu:0' is not a device"),
        ([TRAIN | {"devices": ["cpu:0", "cuda:0"]}, SAMPLE], "both cores and NVIDIA devices"),
        (
            [TRAIN | {"devices": ["cuda:0"]}, SAMPLE | {"devices": ["cuda:GPU-0"]}],
            "cuda:GPU-0 is in the groups 'train' and 'sample'",
        ),
    ],
)
def test_groups_that_cannot_be_are_refused_with_what_is_wrong(groups, fault):
    with pytest.raises(InvalidRequest) as raised:
        groups_of(declared(*groups), host(gpus=1))
    assert raised.value.message.startswith("TANDEM_GROUPS: ")
    assert fault in raised.value.message


def test_without_a_gpu_the_whole_machine_is_one_group_that_is_not_leased():
    (group,) = groups_of(GatewaySettings(), host())
    assert (group.name, group.roles) == ("cpu", {"trainer", "sampler"})
    assert (group.devices, group.leased, group.workers) == ((), False, 0)
    assert group.has_devices_for(4) and not group.has_devices_for(5)


def test_one_gpu_is_for_trainers_and_samplers_in_turn():
    (group,) = groups_of(GatewaySettings(), host(gpus=1))
    assert (group.name, group.roles, group.awake) == ("gpu", {"trainer", "sampler"}, 1)
    assert [str(device) for device in group.devices] == ["cuda:GPU-0"]


def test_of_several_gpus_the_first_are_the_trainers_and_each_other_is_a_samplers():
    groups = groups_of(GatewaySettings(trainer={"ranks": 2}), host(gpus=4))
    assert [(g.name, sorted(g.roles), [str(d) for d in g.devices]) for g in groups] == [
        ("train", ["trainer"], ["cuda:GPU-0", "cuda:GPU-1"]),
        ("sample-2", ["sampler"], ["cuda:GPU-2"]),
        ("sample-3", ["sampler"], ["cuda:GPU-3"]),
    ]


def test_gpus_that_are_all_needed_for_the_ranks_are_shared_with_samplers():
    (group,) = groups_of(GatewaySettings(trainer={"ranks": 2}), host(gpus=2))
    assert group.roles == {"trainer", "sampler"} and len(group.devices) == 2


@pytest.mark.parametrize(
    ("trainer", "sampler", "names"),
    [
        ("cpu", "cpu", ["cpu"]),
        ("cpu", "auto", ["cpu", "sample-0", "sample-1"]),
        ("cuda", "cpu", ["cpu", "train"]),
    ],
)
def test_who_is_to_use_the_cpu_is_not_placed_on_a_gpu(trainer, sampler, names):
    settings = GatewaySettings(trainer={"device": trainer}, sampler={"device": sampler})
    assert [group.name for group in groups_of(settings, host(gpus=2))] == names


def test_it_is_known_which_groups_compute_on_a_cpu():
    def on_cpu(settings: GatewaySettings, machine: Host) -> dict[str, bool]:
        return {group.name: group.on_cpu for group in groups_of(settings, machine)}

    assert on_cpu(GatewaySettings(), host()) == {"cpu": True}
    assert on_cpu(GatewaySettings(), host(gpus=1)) == {"gpu": False}
    samplers_on_cpu = GatewaySettings(sampler={"device": "cpu"})
    assert on_cpu(samplers_on_cpu, host(gpus=1)) == {"cpu": True, "train": False}
