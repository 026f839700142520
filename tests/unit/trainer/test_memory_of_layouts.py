"""What the memory plan says of experts, divided matrices and replicas is what one rank of four has
of them, as torch's allocator tells it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tandem.worker import Layout, TrainingSpec
from tandem.worker_settings import TrainerSettings
from tests.support.allocations import allocations
from tests.support.architectures import write_model
from trainer_service.backends import World
from trainer_service.backends.fsdp2 import Fsdp2Backend
from trainer_service.backends.planning import _micro_batch, _of_micro_batch
from trainer_service.losses.base import LossResult
from trainer_service.optimizers import AdamWSettings

RANKS, TOKENS = 4, 60
LAYOUTS = {
    "shards": Layout(),
    "tensor": Layout(tensor_parallel=2),
    "replicas": Layout(replicas=2),
    "replicas, tensor": Layout(replicas=2, tensor_parallel=2),
}
STEP = AdamWSettings(
    learning_rate=1e-3, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.0, grad_clip_norm=0.0
)


@pytest.fixture(scope="module")
def experts(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("experts") / "qwen3_moe"
    write_model(path, "qwen3_moe")
    return path


@pytest.fixture(scope="module")
def four() -> Iterator[None]:
    """The first of four ranks, which has nobody to talk to: what it computes is wrong, and takes
    the memory that it takes."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("at_once", [False, True], ids=["reduced once", "reduced at once"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_has_of_experts_what_is_planned(experts, four, monkeypatch, layout, at_once):
    monkeypatch.setattr("trainer_service.backends.fsdp2.compare_divided", lambda *_: None)
    settings = TrainerSettings(
        device="cpu",
        micro_batch_tokens=TOKENS,
        shard_group_parameters=1,
        unreduced_gradients_bytes=1 if at_once else 0,
    )
    replicas = LAYOUTS[layout].replicas
    backend = Fsdp2Backend(
        model_path=experts,
        settings=settings,
        world=World(rank=0, size=RANKS, device="cpu"),
        training=TrainingSpec(layout=LAYOUTS[layout]),
    )
    backend.activate()
    micro_batch = _micro_batch(backend, TOKENS)

    def compute(*, last: bool) -> None:
        if not at_once or replicas > 1:
            backend._groups.reduce_with_next_backward(
                in_replica=last or at_once, between_replicas=last
            )
        _, result = backend.loss_of(
            micro_batch, lambda logprobs: LossResult(loss=-logprobs.sum()), by_entry=True
        )
        backend.backward(result.loss)

    compute(last=True)
    planned, parameters = backend.plan.needs.device, backend._trainable.values()
    assert size_of(parameters) == planned["weights"]
    assert size_of(each.grad for each in parameters) == planned["gradients"]
    first = allocations(lambda: compute(last=False))
    assert sum(first) == planned.get("unreduced gradients", 0)
    assert ("unreduced gradients" in planned) == (not at_once or replicas > 1)

    stand_in = backend._stand_in(experts, settings, checkpointed=False, packs=backend.packs)
    living = planned["gathered"] + _of_micro_batch(
        stand_in, TOKENS, on_cpu=False, ranks=RANKS, unreduced=not at_once
    )
    for last in (False, True):
        most = max(accumulate(allocations(lambda last=last: compute(last=last))))
        # Where its shard is whole, a rank gathers nothing, and the plan is too high.
        assert (0.85 if layout == "replicas, tensor" else 0.97) * living < most < 1.03 * living
    moments = sum(allocations(lambda: backend.optimizer.step(STEP)))
    assert planned["moments"] <= moments < planned["moments"] + 500  # and counts of steps


def size_of(tensors: Iterable[torch.Tensor]) -> int:
    """The bytes that this rank has of them."""
    return sum(each.to_local().nbytes for each in tensors)
