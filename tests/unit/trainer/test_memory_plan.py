"""Weights, gradients and moments are exact. The rest is near torch's allocations."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import replace
from itertools import accumulate

import pytest
import torch

from gateway.workers.model_sizes import read_size
from gateway.workers.needs import memory_of_rank
from tandem.backends.memory import Available
from tandem.protocol.worker import TrainingSpec
from tandem.settings.workers import TrainerSettings
from tandem.weights.model_config import has_eager_attention
from tests.support.allocations import allocations
from tests.support.architectures import CONFIGURATIONS, HEAD_ALONE, lora_of, write_model
from tests.support.local_trainer import SPEC, compute, data_of, gradients, make_rank
from tests.support.trainer_worker import datum, request
from trainer_service.backends import World
from trainer_service.backends.planning import _available
from trainer_service.compute.device_memory import map_large_tensors
from trainer_service.models.huggingface import empty_model

GIB = 2**30
STATES = {
    "adamw": (None, {}),
    "dimuon": (None, {"optimizer": "dimuon"}),
    "bfloat16": (None, {"states": "bfloat16"}),
    "adapters": (SPEC, {}),
}


@pytest.mark.parametrize(
    ("checkpointing", "kind"),
    [
        ("off", "full"),
        ("on", "lora"),
        pytest.param("off", "lora", marks=pytest.mark.nightly),
        pytest.param("on", "full", marks=pytest.mark.nightly),
    ],
)
@pytest.mark.parametrize("architecture", CONFIGURATIONS)
def test_activations_and_logits_are_near_to_what_torch_allocates(
    tmp_path, architecture, checkpointing, kind
):
    if kind == "lora" and architecture in HEAD_ALONE:
        pytest.skip("no gradient goes through its blocks")
    trainer = make_rank(
        write_model(tmp_path, architecture),
        lora_of(architecture) if kind == "lora" else None,
        checkpointing=checkpointing,
        micro_batch_tokens=64,
        parallel_micro_batches=1,
    )
    message = request([datum(range(3, 67), weights=[1.0] * 64)])
    compute(trainer, message)  # gradients exist from here on
    taken = max(accumulate(allocations(lambda: compute(trainer, message))))
    parts = trainer.backend.plan.device
    assert 0.6 < (parts["activations"] + parts["logits"]) / taken < 1.75


@pytest.mark.parametrize("architecture", CONFIGURATIONS)
def test_eager_attention_is_known_without_torch(tmp_path, architecture):
    path = write_model(tmp_path, architecture)
    config = empty_model(path).config
    eager = config._attn_implementation == "eager" or architecture == "gemma2"
    assert has_eager_attention(config.to_dict()) == eager


@pytest.mark.parametrize("kind", STATES)
def test_weights_gradients_and_moments_are_exact(model, group, kind):
    lora, about = STATES[kind]
    trainer = make_rank(model, lora, parallel_micro_batches=1, **about)
    compute(trainer, request(data_of()))
    backend = trainer.backend
    planned, trained = backend.plan.device, list(backend._trainable.values())
    assert bytes_of(trained) == planned["weights"]
    assert bytes_of(each.grad for each in trained) == planned["gradients"]
    moments = bytes_of(each for each in backend.optimizer.state(create=True).values() if each.ndim)
    assert moments == planned["moments"]


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    return sum(getattr(each, "_local_tensor", each).nbytes for each in tensors)


def test_a_pod_requests_the_parts_of_its_trainer_s_plan(model, group):
    for states in ("float32", "bfloat16"):
        settings = {"parallel_micro_batches": 1, "shard_group_parameters": 1}
        planned = make_rank(model, states=states, **settings).backend.plan.device
        trainer = TrainerSettings(device="cpu", **settings)
        training = TrainingSpec(states=states)
        pod = memory_of_rank(read_size(model), trainer, training, gpu=False, runs=1)
        requested = pod.parts(2048, checkpointed=False, copied=False)
        assert requested == planned


# --- The memory that there is, and the choice -----------------------------------------------------


def test_ranks_of_one_host_share_nine_tenths_of_its_free_memory(monkeypatch):
    monkeypatch.setattr("trainer_service.backends.planning.free_memory_bytes", lambda: 10 * GIB)

    def found(on_node: int, **settings: int) -> Available:
        world = World(rank=0, size=1, device="cpu", on_node=on_node)
        return _available(TrainerSettings(**settings), world)

    assert found(1) == Available(device=9 * GIB)
    assert found(3) == Available(device=3 * GIB)
    assert found(2, memory_bytes=4 * GIB) == Available(device=2 * GIB)
    assert found(1, memory_bytes=20 * GIB) == Available(device=9 * GIB)


def test_a_rank_with_a_gpu_plans_with_its_budget_or_what_is_free_whichever_is_less(monkeypatch):
    monkeypatch.setattr("trainer_service.backends.planning.free_memory_bytes", lambda: 10 * GIB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (50 * GIB, 80 * GIB))

    def found(budget: int) -> int:
        world = World(rank=0, size=1, device="cuda")
        return _available(TrainerSettings(memory_bytes=budget), world).device

    assert found(0) == 45 * GIB
    assert found(30 * GIB) == 30 * GIB
    assert found(70 * GIB) == 45 * GIB


def test_a_trainer_takes_the_checkpointing_that_its_plan_chose_and_computes_the_same_bits(model):
    whole = make_rank(model)
    needed = sum(whole.backend.plan.device.values())
    small = make_rank(model, memory_bytes=needed - 1)
    assert [each.backend.plan.checkpointing for each in (whole, small)] == [False, True]
    for trainer in (whole, small):
        compute(trainer, request(data_of()))
    for name, gradient in gradients(whole).items():
        assert torch.equal(gradients(small)[name], gradient)


def test_a_sequence_that_needs_checkpointed_blocks_gets_them_and_has_the_same_bits(model):
    data = request([datum(range(3, 67), weights=[1.0] * 64)])
    whole, small = make_rank(model), make_rank(model, micro_batch_tokens=16)
    small.backend.plan = replace(small.backend.plan, available=Available(device=0))
    states = []
    for trainer in (whole, small):
        compute(trainer, data)
        states.append(trainer.backend._checkpointing.on)
    assert states == [False, True]
    for name, gradient in gradients(whole).items():
        assert torch.equal(gradients(small)[name], gradient)
    compute(small, request(data_of(count=1)))
    assert not small.backend._checkpointing.on


def test_large_tensors_do_not_make_the_heap_of_a_trainer_on_a_cpu_longer():
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        pytest.skip("not glibc, or one before 2.33")
    libc.mallinfo2.restype = _MallocInfo
    map_large_tensors()
    size = 2**21
    torch.empty(size, dtype=torch.uint8)  # glibc alone would now use its heap for this size
    before = libc.mallinfo2().heap
    _kept = [torch.empty(size, dtype=torch.uint8) for _ in range(16)]
    assert libc.mallinfo2().heap == before


class _MallocInfo(ctypes.Structure):
    """The struct of mallinfo(3)."""

    _fields_ = (("heap", ctypes.c_size_t), ("others", ctypes.c_size_t * 9))
