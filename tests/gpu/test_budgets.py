from __future__ import annotations

import gc

import pytest
import torch
import torch.distributed as dist

from tandem.protocol.worker import TrainingSpec
from tests.support.devices import operations_on_gpu
from trainer_service.checkpoints.staging import staging_of
from trainer_service.checkpoints.training_state import state_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
GIB = 2**30


def test_a_trainer_takes_no_more_of_a_gpu_than_its_budget(tmp_path) -> None:
    try:
        with operations_on_gpu(
            tmp_path, dtype="bfloat16", training=TrainingSpec(), memory_bytes=12 * GIB
        ) as operations:
            plan = operations.trainer.backend.plan
            assert plan is not None
            assert plan.available.device == 12 * GIB
            with pytest.raises(torch.OutOfMemoryError):
                torch.empty(13 * GIB, dtype=torch.uint8, device="cuda")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_single_rank_whose_weights_are_whole_has_no_process_group(tmp_path, dtype) -> None:
    with operations_on_gpu(tmp_path, dtype=dtype, training=TrainingSpec()):
        assert not dist.is_initialized()


def test_snapshots_are_copied_to_the_same_pinned_memory(tmp_path) -> None:
    with operations_on_gpu(tmp_path, dtype="bfloat16", training=TrainingSpec()) as operations:
        state = state_of(operations.trainer.backend, create=True)
        staging = staging_of("cuda")
        first = staging.copy(state)
        large = [each for each in first.values() if each.nbytes >= 2**20]
        assert large and all(each.is_pinned() for each in large)
        places = {name: each.data_ptr() for name, each in first.items()}
        staging.end_copy(first)
        second = staging.copy(state)
        assert {name: each.data_ptr() for name, each in second.items()} == places
        assert all(torch.equal(second[name], state[name].cpu()) for name in state)
        staging.end_copy(second)
        staging.free()
        del first, second, large
        gc.collect()
        assert all(
            torch.equal(each, state[name].cpu()) for name, each in staging.copy(state).items()
        )
