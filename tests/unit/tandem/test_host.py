from __future__ import annotations

from types import SimpleNamespace

import pytest

from tandem.agent import host
from tandem.agent.host import Accelerator, Host
from tandem.errors import InvalidRequest
from tandem.settings.gateway import GatewaySettings
from tandem.stack.host_summary import describe_found, usual_ranks
from tests.support.fake_nvml import pynvml

GPUS = ("GPU-11aa-1", "GPU-11aa-2", "GPU-22bb-3")


def test_what_is_free_is_bounded_by_the_container_whose_cache_counts_as_free(tmp_path, monkeypatch):
    monkeypatch.setattr(host, "_CGROUP", tmp_path)
    monkeypatch.setattr(host.psutil, "virtual_memory", lambda: SimpleNamespace(available=9000))
    assert host.free_memory_bytes() == 9000
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("4000\n")
    (tmp_path / "memory.stat").write_text("anon 1500\ninactive_file 2500\n")
    assert host.free_memory_bytes() == 3500
    (tmp_path / "memory.max").write_text("max\n")
    assert host.free_memory_bytes() == 9000


@pytest.mark.parametrize(
    ("visible", "indices"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("-1", []),
        ("1", [1]),
        ("2,0", [0, 2]),
        ("GPU-22bb-3", [2]),
        ("GPU-2", [2]),
        ("GPU-2, GPU-11aa-1", [0, 2]),
        ("0,7,1", [0]),  # CUDA stops at the first unknown name
        ("GPU-33, 0", []),
        ("22bb", []),
    ],
)
def test_visible_devices_are_those_that_cuda_would_see(monkeypatch, visible, indices):
    pynvml.install(monkeypatch, *GPUS)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [each.index for each in host.accelerators()] == indices


def test_the_beginning_of_several_uuids_is_refused_with_both(monkeypatch):
    pynvml.install(monkeypatch, *GPUS)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-11")
    with pytest.raises(InvalidRequest, match=r"cuda:0 \(GPU-11aa-1\) and cuda:1 .* begin so"):
        host.accelerators()


@pytest.mark.parametrize("name", ["MIG-8f6a", "MIG-GPU-11aa-1/1/0", "0,MIG-8f6a"])
def test_a_mig_instance_that_is_made_visible_is_refused_by_name(monkeypatch, name):
    pynvml.install(monkeypatch, *GPUS)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", name)
    with pytest.raises(InvalidRequest, match=r"names the MIG instance MIG-.* turn MIG off"):
        host.accelerators()


def test_a_divided_device_is_refused_by_name_unless_it_is_left_out(monkeypatch):
    pynvml.install(monkeypatch, "GPU-1", "GPU-2/MIG")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(InvalidRequest, match=r"cuda:1 \(GPU-2\), NVIDIA H200, is divided into MIG"):
        host.accelerators()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert [each.uuid for each in host.accelerators()] == ["GPU-1"]


def on(gpus: int, cores: int = 2) -> Host:
    devices = (Accelerator(n, f"GPU-{n}", "NVIDIA H200", 143_771 * 2**20) for n in range(gpus))
    return Host("box", tuple(range(cores)), 2**30, tuple(devices))


def group(*devices: str, roles: tuple[str, ...] = ("trainer", "sampler")) -> dict[str, object]:
    return {"name": f"g{len(devices)}", "devices": list(devices), "roles": list(roles)}


@pytest.mark.parametrize(
    ("gpus", "settings", "ranks"),
    [
        (0, {}, 2),
        (1, {}, 1),
        (8, {}, 1),
        (1, {"trainer": {"device": "cpu"}}, 2),
        (1, {"trainer": {"ranks": 4}}, 4),  # the gateway refuses it, with both numbers
        (0, {"groups": [group("cpu:0")]}, 1),
        (1, {"groups": [group("cpu:0", "cpu:1", "cpu:2")]}, 2),
        (2, {"groups": [group("cuda:0", "cuda:1")]}, 1),
        (
            2,
            {"groups": [group("cpu:0", roles=("trainer",)), group("cuda:0", roles=("sampler",))]},
            1,
        ),
    ],
)
def test_a_demo_has_one_rank_on_gpus_and_two_on_cores_that_are_there(gpus, settings, ranks):
    assert usual_ranks(GatewaySettings(**settings), on(gpus)) == ranks


@pytest.mark.parametrize(
    ("gpus", "cores", "settings", "sentence"),
    [
        (0, 2, {}, "no GPU: trainers run 2 ranks on 2 cores"),
        (0, 1, {}, "no GPU: trainers run 2 ranks on 1 core"),
        (1, 2, {}, "found one NVIDIA H200 (140 GiB): trainers run 2 ranks"),
        (4, 2, {}, "found 4 NVIDIA H200 (140 GiB each): trainers run 2 ranks"),
        (
            1,
            2,
            {"trainer": {"device": "cpu"}},
            "found one NVIDIA H200 (140 GiB): trainers run 2 ranks on 2 cores",
        ),
        (0, 2, {"groups": [group("cpu:0")]}, "no GPU: trainers run 2 ranks on g1"),
    ],
)
def test_a_start_says_what_it_found(gpus, cores, settings, sentence):
    assert describe_found(GatewaySettings(**settings), on(gpus, cores), ranks=2) == sentence
