from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tandem.protocol.worker import Layout, TrainingSpec
from tandem.settings.workers import TrainerSettings
from tests.support.allocations import allocations
from tests.support.architectures import write_model
from trainer_service.backends import World
from trainer_service.backends.fsdp2 import Fsdp2Backend
from trainer_service.batches.micro_batches import stand_in

RANKS, TOKENS = 4, 60
LAYOUTS = {
    "shards": Layout(),
    "tensor": Layout(tensor_parallel=2),
    "replicas": Layout(replicas=2),
    "replicas, tensor": Layout(replicas=2, tensor_parallel=2),
}


@pytest.fixture(scope="module")
def experts(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("experts"), "qwen3_moe")


@pytest.fixture(scope="module")
def four() -> Iterator[None]:
    """The first of four ranks in a fake group. Its numbers are wrong, but need the same memory."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("at_once", [False, True], ids=["reduced once", "reduced at once"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_of_several_has_its_plan_s_states_and_needs_no_more_for_a_micro_batch(
    experts, four, monkeypatch, layout, at_once
):
    monkeypatch.setattr("trainer_service.backends.fsdp2.compare_divided", lambda *_: None)
    monkeypatch.setattr("trainer_service.batches.micro_batches.STAND_IN_TOKENS", TOKENS)
    backend = Fsdp2Backend(
        model_path=experts,
        settings=TrainerSettings(
            device="cpu",
            micro_batch_tokens=TOKENS,
            shard_group_parameters=1,
            unreduced_gradients_bytes=1 if at_once else 0,
        ),
        world=World(rank=0, size=RANKS, device="cpu"),
        training=TrainingSpec(layout=LAYOUTS[layout]),
    )
    backend.activate()

    def backward(*, last: bool) -> None:
        replicas = LAYOUTS[layout].replicas
        if not at_once or replicas > 1:
            backend._groups.reduce_with_next_backward(
                in_replica=last or at_once, between_replicas=last
            )
        logprobs = backend.logprobs(stand_in(packed=backend.packs), gradients=True)
        backend.backward(logprobs.sum())

    backward(last=True)
    planned, trained = backend.plan.device, list(backend._trainable.values())
    assert bytes_of(trained) == planned["weights"]
    assert bytes_of(each.grad for each in trained) == planned["gradients"]
    kept = sum(allocations(lambda: backward(last=False)))
    assert kept == planned.get("unreduced gradients", 0)
    passing = sum(planned[name] for name in ("activations", "logits", "gathered"))
    for last in (False, True):
        taken = max(accumulate(allocations(lambda last=last: backward(last=last))))
        assert 1 < passing / taken < 1.6
    state = backend.optimizer.state(create=True).values()
    assert bytes_of(each for each in state if each.ndim) == planned["moments"]


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    return sum(each.to_local().nbytes for each in tensors)
