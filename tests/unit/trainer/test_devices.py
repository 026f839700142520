from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tandem.errors import UnsupportedByBackend, WorkerStartFailed
from tandem.protocol.devices import devices_of_ranks, parse_device
from tandem.protocol.worker import LoraSpec, TrainingSpec, WorkerSpec
from tandem.settings.workers import TrainerSettings
from tests.support.local_trainer import compute, data_of
from tests.support.trainer_worker import request
from trainer_service.backends.base import TrainerBackend
from trainer_service.backends.fsdp2 import Fsdp2Backend
from trainer_service.compute import process_group
from trainer_service.compute.process_group import (
    Assignment,
    check_capabilities,
    kind_of_device,
    threads_of,
)
from trainer_service.service.libraries import set_environment


def kind(device: str, ranks: int, *, gpus: int, given: str = "") -> str:
    settings = TrainerSettings(device=device)
    device = parse_device(given) if given else None
    return kind_of_device(settings, device, gpus=gpus, ranks=ranks)


@pytest.mark.parametrize(
    ("device", "ranks", "gpus", "expected"),
    [
        ("auto", 2, 0, "cpu"),
        ("auto", 2, 2, "cuda"),
        ("auto", 1, 8, "cuda"),
        ("cpu", 2, 8, "cpu"),
        ("cuda", 2, 2, "cuda"),
    ],
)
def test_without_devices_the_settings_choose(device, ranks, gpus, expected):
    assert kind(device, ranks, gpus=gpus) == expected


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_fewer_gpus_than_ranks_are_an_error_that_says_what_to_do(device):
    with pytest.raises(WorkerStartFailed, match=r"3 ranks need a GPU each, .* has 2: set") as error:
        kind(device, 3, gpus=2)
    assert "TANDEM_TRAINER_RANKS to 2 at most, or TANDEM_TRAINER_DEVICE to cpu" in str(error.value)


def test_gpus_asked_for_on_a_machine_without_are_an_error():
    with pytest.raises(WorkerStartFailed, match="has 0: set TANDEM_TRAINER_DEVICE to cpu"):
        kind("cuda", 1, gpus=0)


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda"])
def test_devices_that_are_given_are_used_whatever_the_settings_say(device):
    assert kind(device, 2, gpus=1, given="cuda:1") == "cuda"  # each rank sees one
    assert kind(device, 2, gpus=0, given="cpu:0") == "cpu"


def test_a_gpu_that_is_given_and_not_there_is_an_error():
    with pytest.raises(WorkerStartFailed, match="was given cuda:5, which torch does not find"):
        kind("auto", 1, gpus=0, given="cuda:5")


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        (["cpu:0"], "2 ranks were given 1 devices, not one each"),
        (["cpu:0", "cpu:1", "cpu:2"], "2 ranks were given 3 devices"),
        (["cpu:0", "cuda:0"], "devices of one kind, not on cpu:0, cuda:0"),
        (["cpu:0", "gpu:0"], "'gpu:0' is not a device"),
    ],
)
def test_each_rank_needs_a_device_of_the_same_kind(names, sentence):
    with pytest.raises(WorkerStartFailed, match=sentence):
        devices_of_ranks(names, ranks=2)


def test_ranks_without_devices_have_the_whole_machine():
    assert devices_of_ranks([], ranks=2) == []


def refused(**spec) -> str:
    about = WorkerSpec(
        worker_id="t", kind="trainer", secret="s", model_name="m", model_path="m", session_id="s"
    ).model_copy(update=spec)
    try:
        check_capabilities(about, "own")
    except WorkerStartFailed as error:
        return error.message
    return ""


def test_a_backend_that_cannot_sleep_is_refused_where_it_must_and_its_host_cannot(monkeypatch):
    monkeypatch.setattr(process_group, "backend_named", lambda name: TrainerBackend)
    reason = "cuda-checkpoint is not installed"
    assert refused(lease=0, no_suspender=reason) == ""
    assert refused(lease=7, no_suspender="") == ""
    assert reason in refused(lease=7, no_suspender=reason)
    monkeypatch.setattr(process_group, "backend_named", lambda name: Fsdp2Backend)
    assert refused(lease=7, no_suspender=reason) == ""


def test_adapters_are_refused_before_the_start_where_the_backend_cannot_train_them(monkeypatch):
    lora = TrainingSpec(lora=LoraSpec(rank=4))
    monkeypatch.setattr(process_group, "backend_named", lambda name: Fsdp2Backend)
    assert refused(training=lora) == ""
    monkeypatch.setattr(process_group, "backend_named", lambda name: TrainerBackend)
    assert refused(training=TrainingSpec()) == ""
    with pytest.raises(UnsupportedByBackend, match="TrainerBackend cannot train adapters"):
        refused(training=lora)


@pytest.mark.parametrize(
    ("own_cores", "threads", "expected"), [(True, 0, 8), (False, 0, 4), (True, 3, 3), (False, 3, 3)]
)
def test_ranks_share_the_cores_that_are_not_their_own(monkeypatch, own_cores, threads, expected):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    rank = assignment(on_node=2, own_cores=own_cores, settings=TrainerSettings(threads=threads))
    assert threads_of(rank) == expected


def assignment(**fields: object) -> Assignment:
    return Assignment(
        **{
            "rank": 0,
            "local_rank": 0,
            "on_node": 1,
            "size": 1,
            "device": "cpu",
            "own_cores": False,
            "store_port": 1,
            "model_path": Path("models/tiny"),
            "model_name": "tiny",
            "training": TrainingSpec(),
            "settings": TrainerSettings(),
            **fields,
        }
    )


@pytest.mark.parametrize(("budget", "fractions"), [(0, []), (20, [0.25]), (100, [1.0])])
def test_a_rank_takes_no_more_of_its_gpu_than_its_budget(monkeypatch, budget, fractions):
    found: list[float] = []
    monkeypatch.setattr(process_group, "_visible_gpus", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda number: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (70 * 2**30, 80 * 2**30))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", found.append)
    settings = TrainerSettings(memory_bytes=budget * 2**30)
    process_group._take_gpu(assignment(settings=settings))
    assert found == fractions


@pytest.mark.parametrize(
    ("dtype", "training", "meets"),
    [
        ("float32", TrainingSpec(), False),
        ("bfloat16", TrainingSpec(), False),
        ("bfloat16", TrainingSpec(states="bfloat16"), False),
        ("bfloat16", TrainingSpec(lora=LoraSpec(rank=4)), False),
        ("float32", TrainingSpec(states="bfloat16"), True),
        ("float32", TrainingSpec(offload="weights"), True),
    ],
)
def test_a_single_rank_has_a_process_group_only_where_its_weights_are_sharded(
    model, dtype, training, meets
):
    """On a GPU it would be NCCL's, which starts threads and takes memory."""
    chosen = TrainerSettings(device="cpu", threads=1, dtype=dtype)
    alone = assignment(settings=chosen, training=training, model_path=model)
    try:
        trainer = process_group.join(alone)
        assert dist.is_initialized() == meets
        compute(trainer, request(data_of()))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def test_several_threads_pin_memory_unless_the_operator_configures_torch_s_allocator(monkeypatch):
    names = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
    for own in (None, *names):
        for name in names:
            monkeypatch.delenv(name, raising=False)
        if own:
            monkeypatch.setenv(own, "max_split_size_mb:64")
        set_environment()
        found = {name: os.environ[name] for name in names if name in os.environ}
        if own:
            assert found == {own: "max_split_size_mb:64"}
        else:
            assert list(found) == ["PYTORCH_ALLOC_CONF"]
            assert "pinned_num_register_threads:8" in found["PYTORCH_ALLOC_CONF"]
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
