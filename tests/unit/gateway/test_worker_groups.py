"""Groups of workers: the devices of a request, and the groups of an undeclared machine."""

from __future__ import annotations

import pytest

from gateway.workers.declared_groups import budgets_of, groups_of
from gateway.workers.groups import WorkerGroup
from gateway.workers.requests import WorkerRequest
from tandem.agent.host import Accelerator, Host
from tandem.errors import InvalidRequest
from tandem.settings.gateway import GatewaySettings
from tandem.settings.sharing import Sharing

GIB = 2**30
TRAIN = {"name": "train", "devices": ["cpu:0"], "roles": ["trainer"]}
SAMPLE = {"name": "sample", "devices": ["cpu:1"], "roles": ["sampler"]}
BOTH = {"name": "both", "devices": ["cpu:0"], "roles": ["trainer", "sampler"]}


def host(*, gpus: int = 0, cores: int = 4) -> Host:
    found = (Accelerator(n, f"GPU-{n}", "H100", 80 * GIB) for n in range(gpus))
    return Host("box", tuple(range(cores)), 64 * GIB, tuple(found))


def declared(*groups: dict[str, object], **settings: object) -> GatewaySettings:
    return GatewaySettings(groups=list(groups), **settings)


def pods(*pools: dict[str, object]) -> GatewaySettings:
    kubernetes = {"placement": "shared", "trainer_image": "t", "sampler_image": "s"}
    return GatewaySettings(launcher="kubernetes", claim_pools=list(pools), kubernetes=kubernetes)


def undeclared(gpus: int, **settings: object) -> dict[str, tuple[str, ...]]:
    """Return the devices of each group of an undeclared host."""
    found = groups_of(GatewaySettings(**settings), host(gpus=gpus))
    return {group.name: group.devices for group in found}


# --- Declared groups ------------------------------------------------------------------------------


def test_declared_groups_have_their_devices_and_the_defaults():
    train, sample = groups_of(declared(TRAIN, SAMPLE), host())
    assert (train.name, train.devices) == ("train", ("cpu:0",))
    assert (train.kinds, sample.kinds) == ({"trainer", "job"}, {"engine"})
    assert (train.awake, train.workers, train.device_bytes, train.leased) == (1, 16, 0, True)
    assert train.on_host


def test_a_group_declares_who_shares_its_devices_and_by_mps_all_workers_are_awake():
    (plain,) = groups_of(declared(BOTH), host())
    assert plain.sharing == Sharing.TIME_SLICE
    gpu = BOTH | {"devices": ["cuda:0"], "awake": 1}
    (by_mps,) = groups_of(declared(gpu | {"sharing": "mps"}), host(gpus=1))
    assert (by_mps.sharing, by_mps.awake, by_mps.leased) == (Sharing.MPS, 0, False)
    (alone,) = groups_of(declared(gpu | {"sharing": "exclusive"}), host(gpus=1))
    assert (alone.sharing, alone.awake) == (Sharing.EXCLUSIVE, 1)
    pool = {"name": "gpu", "roles": BOTH["roles"], "device_class": "gpu.nvidia.com"}
    for value, awake in (("mps", 0), ("exclusive", 1), ("time_slice", 1)):
        (group,) = groups_of(pods(pool | {"sharing": value, "memory_bytes": GIB}), Host())
        assert (group.sharing, group.awake) == (value, awake)


@pytest.mark.parametrize("name", ["cuda:1", "cuda:GPU-1"])
def test_an_nvidia_device_is_known_by_its_uuid_and_its_memory(name):
    (group,) = groups_of(declared(BOTH | {"devices": [name]}), host(gpus=2))
    assert (group.devices, group.device_bytes) == (("cuda:GPU-1",), 80 * GIB)
    assert not group.on_host


def test_an_ambiguous_beginning_of_a_uuid_is_refused():
    alike = tuple(Accelerator(n, f"GPU-1{n}", "H100", 80 * GIB) for n in range(2))
    with pytest.raises(InvalidRequest, match=r"GPU-1 is ambiguous: cuda:0 .* and cuda:1 "):
        groups_of(declared(BOTH | {"devices": ["cuda:GPU-1"]}), Host("box", (0,), GIB, alike))


@pytest.mark.parametrize(
    ("groups", "fault"),
    [
        ([TRAIN], 'no group has "sampler" among its roles'),
        ([TRAIN, SAMPLE | {"name": "train"}], "2 groups have the name 'train'"),
        ([TRAIN | {"devices": ["gpu:0"]}, SAMPLE], "'gpu:0' is not a device"),
        ([TRAIN | {"devices": ["cpu:64"]}, SAMPLE], "the host has cpu:0-3, and no cpu:64"),
        ([TRAIN | {"devices": ["cuda:7"]}, SAMPLE], "the host has cuda:0 (GPU-0)"),
        ([TRAIN | {"devices": ["cpu:0", "cuda:0"]}, SAMPLE], "has both cores and NVIDIA devices"),
        ([TRAIN | {"sharing": "mps"}, SAMPLE], "shares cores by mps, which is for NVIDIA devices"),
        ([TRAIN, SAMPLE | {"devices": ["cpu:0-1"]}], "core 0 is in the groups 'train' and"),
        ([TRAIN | {"devices": ["cpu:0", "cpu:0-1"]}, SAMPLE], "names a device twice"),
        (
            [TRAIN | {"devices": ["cuda:0"]}, SAMPLE | {"devices": ["cuda:GPU-0"]}],
            "cuda:GPU-0 is in the groups 'train' and 'sample'",
        ),
    ],
)
def test_groups_that_cannot_be_are_refused_with_the_fault(groups, fault):
    with pytest.raises(InvalidRequest) as raised:
        groups_of(declared(*groups), host(gpus=1))
    assert raised.value.message.startswith("TANDEM_GROUPS: ")
    assert fault in raised.value.message


# --- An undeclared host ---------------------------------------------------------------------------


def test_a_machine_without_a_gpu_is_one_group_whose_workers_all_stay_awake():
    (cpu,) = groups_of(GatewaySettings(), host(cores=8))
    assert (cpu.name, cpu.leased, cpu.on_host, cpu.workers) == ("cpu", False, True, 0)
    assert cpu.kinds == {"trainer", "engine", "job"}
    assert cpu.has_devices_for(8) and not cpu.has_devices_for(9)


def test_trainer_and_engine_may_be_awake_side_by_side_on_one_gpu():
    (gpu,) = groups_of(GatewaySettings(), host(gpus=1))
    assert (gpu.name, gpu.devices, gpu.awake) == ("gpu", ("cuda:GPU-0",), 2)
    assert gpu.kinds == {"trainer", "engine", "job"}


def test_with_one_rank_each_gpu_is_a_group_for_everything():
    assert undeclared(3) == {f"gpu-{n}": (f"cuda:GPU-{n}",) for n in range(3)}


def test_with_several_ranks_each_trainer_leaves_a_gpu_for_an_engine():
    found = undeclared(8, trainer={"ranks": 2})
    assert [*found] == ["train-0", "train-1", *(f"sample-{n}" for n in range(4))]
    assert found["train-1"] == ("cuda:GPU-2", "cuda:GPU-3")
    assert undeclared(2, trainer={"ranks": 2}) == {"gpu": ("cuda:GPU-0", "cuda:GPU-1")}


@pytest.mark.parametrize(
    ("trainer", "sampler", "names"),
    [
        ("cpu", "cpu", ["cpu"]),
        ("cpu", "auto", ["cpu", "sample-0", "sample-1"]),
        ("cuda", "cpu", ["cpu", "train-0", "train-1"]),
    ],
)
def test_a_role_on_the_cpu_has_no_place_on_a_gpu(trainer, sampler, names):
    assert [*undeclared(2, trainer={"device": trainer}, sampler={"device": sampler})] == names


def test_host_memory_and_starts_at_once_bound_the_workers_of_a_machine():
    budgets = budgets_of(GatewaySettings(), host(cores=2))
    assert (budgets.host_bytes, budgets.starts) == (64 * GIB * 9 // 10, 2)
    assert budgets_of(GatewaySettings(), host(cores=64)).starts == 8
    assert budgets_of(GatewaySettings(host_memory_bytes=GIB), host()).host_bytes == GIB


# --- Pools ----------------------------------------------------------------------------------------


def test_each_claim_of_a_pool_is_a_group_whose_pods_number_its_devices_anew():
    gpu = {"name": "gpu", "roles": ["trainer", "sampler"], "device_class": "gpu.nvidia.com"}
    cpu = {"name": "cpu", "roles": ["trainer"]}
    settings = pods(gpu | {"claims": 2, "devices": 2, "memory_bytes": 80 * GIB}, cpu)
    first, second, other = groups_of(settings, Host())
    assert (first.name, second.name, other.name) == ("gpu-0", "gpu-1", "cpu-0")
    assert first.devices == second.devices == ("cuda:0", "cuda:1")
    assert (first.device_bytes, first.on_host, other.on_host) == (80 * GIB, False, True)
    assert (other.devices, other.kinds) == ((), {"trainer", "job"})
    assert budgets_of(settings, host()).host_bytes == 0, "each pod has memory of its own"


# --- Requests -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("groups", "suits"), [((), True), (("g",), True), (("pool",), True), (("h",), False)]
)
def test_a_request_names_groups_or_families(groups, suits):
    group = WorkerGroup(name="g", pool="pool", kinds=frozenset({"trainer"}))
    request = WorkerRequest(key="t", kind="trainer", owner="ann", session="s", groups=groups)
    assert group.suits(request) == suits


def test_ranks_use_the_first_devices_of_each_node():
    group = WorkerGroup(name="g", kinds=frozenset({"trainer"}), devices=("0", "1", "2"), nodes=2)
    assert group.devices_for(2) == ("0", "1")
    assert group.devices_for(4) == ("0", "1", "0", "1")
    assert not group.has_devices_for(5) and not group.has_devices_for(9)


def test_the_ranks_of_a_job_meet_on_one_node():
    group = WorkerGroup(
        name="train-0", kinds=frozenset({"trainer", "job"}), devices=("cuda:0",), nodes=2
    )
    about = {"key": "k", "owner": "o", "session": "s"}
    assert group.suits(WorkerRequest(kind="trainer", ranks=2, **about))
    assert group.suits(WorkerRequest(kind="job", ranks=1, **about))
    assert not group.suits(WorkerRequest(kind="job", ranks=2, **about))
