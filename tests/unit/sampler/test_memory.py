from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sampler_service.engine import SleepLevel
from sampler_service.vllm.memory import (
    Sleeper,
    UnwrittenZeros,
    cache_bytes,
    drop_weights,
    memory_share,
    release_pages,
    resident_bytes,
)
from tandem.errors import WorkerStartFailed

GIB = 2**30


@given(total=st.integers(8 * GIB, 200 * GIB), percent=st.integers(1, 100))
def test_a_budget_in_bytes_is_what_vllm_takes_of_the_gpu(total: int, percent: int):
    wanted = total * percent // 100
    share = memory_share(wanted, free=wanted, total=total)
    assert 0 < share <= 1
    assert abs(math.ceil(total * share) - wanted) <= 1, "as vLLM computes it"


def test_a_budget_that_is_not_free_is_refused_with_the_numbers():
    with pytest.raises(WorkerStartFailed, match=r"40\.0 GiB of the GPU's 80\.0, of which 30\.0"):
        memory_share(40 * GIB, free=30 * GIB, total=80 * GIB)


def test_a_budget_that_leaves_no_kv_cache_is_refused_with_the_numbers():
    assert cache_bytes(8 * GIB, peak=5 * GIB) == 2 * GIB
    with pytest.raises(WorkerStartFailed, match=r"of 4\.0 GiB leaves nothing .* take 3\.5 GiB"):
        cache_bytes(4 * GIB, peak=7 * GIB // 2)


class RecordingEngine:
    def __init__(self) -> None:
        self.calls: list[tuple[str, object]] = []

    def sleep(self, *, level: int) -> None:
        self.calls.append(("sleep", level))

    def wake_up(self, *, tags: list[str]) -> None:
        self.calls.append(("wake_up", tags))

    def collective_rpc(self, method: str, *, kwargs: dict[str, object] | None = None) -> None:
        self.calls.append((method, kwargs or {}))


@pytest.mark.parametrize("level", SleepLevel)
def test_a_gpu_sleeps_by_vllms_own_means_and_wakes_its_weights_before_its_cache(
    level: SleepLevel,
):
    engine = RecordingEngine()
    sleeper = Sleeper(engine, on_gpu=True)
    sleeper.sleep(level)
    sleeper.wake("weights")
    sleeper.wake("kv_cache")
    pinned = [("tandem_free_pinned", {})] * (level is SleepLevel.DROP_WEIGHTS)
    assert engine.calls == [
        ("sleep", level.value),
        *pinned,
        ("wake_up", ["weights"]),
        ("wake_up", ["kv_cache"]),
    ]


def test_a_cpu_sleeps_by_ours():
    engine = RecordingEngine()
    sleeper = Sleeper(engine, on_gpu=False)
    for level in SleepLevel:
        sleeper.sleep(level)
        sleeper.wake("weights")
        sleeper.wake("kv_cache")
    assert engine.calls == [
        ("tandem_cpu_sleep", {"drop": False}),
        ("tandem_cpu_sleep", {"drop": True}),
    ]


def test_pages_that_are_given_back_are_zeros_and_can_be_written_again():
    tensor = torch.ones(64 * 2**20, dtype=torch.uint8)
    view = tensor[100:].view(-1)
    neighbour = torch.ones(4096)
    before = resident_bytes()
    release_pages([tensor, view])
    assert before - resident_bytes() > 60 * 2**20
    assert tensor.sum() < 2 * 4096, "but for a page that it shares at each end"
    assert neighbour.all()
    tensor.fill_(7)
    assert int(view[50]) == 7


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2**20), requires_grad=False)
        self.register_buffer("table", torch.ones(2**20))
        self.lora_a_stacked = (torch.ones(2**20),)


def test_dropped_weights_are_gone_with_adapters_and_buffers_stay():
    model = torch.nn.Sequential(Layer(), torch.nn.LayerNorm(4))
    layer = model[0]
    drop_weights(model)
    assert layer.weight.sum() < 2 * 4096
    assert layer.lora_a_stacked[0].sum() < 2 * 4096
    assert layer.table.all()


def test_large_zeros_take_memory_when_they_are_written():
    size = 64 * 2**20
    before = resident_bytes()
    with UnwrittenZeros():
        cache = torch.zeros(size, dtype=torch.int8, device=torch.device("cpu"))
        small, shaped = torch.zeros(3), torch.zeros((2**8, 2**8))
    assert resident_bytes() - before < size // 2
    assert cache.dtype == torch.int8 and cache.shape == (size,)
    assert small.tolist() == [0.0] * 3 and shaped.shape == (2**8, 2**8)
    cache[: size // 2] = 1
    assert resident_bytes() - before >= size // 2
    assert int(cache.view(torch.int64).count_nonzero()) == size // 16
    release_pages([cache])
    assert not cache.any()
