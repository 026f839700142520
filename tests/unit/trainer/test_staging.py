from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tandem.errors import OutOfMemory
from tandem.v1 import common_pb2
from tests.unit.trainer.test_sharing import host
from trainer_service.checkpoints.snapshots import Snapshots
from trainer_service.checkpoints.staging import Copy, Staging, staging_of

LARGE, SMALL = 2**19, 5


def state(value: float, *, more: bool = False) -> dict[str, Tensor]:
    made = {"model.w": torch.full((LARGE,), value), "model.b": torch.full((SMALL,), value)}
    return {**made, "optimizer.w": torch.full((LARGE,), -value)} if more else made


def values(copy: Copy) -> dict[str, float]:
    assert all(bool((each == each[0]).all()) for each in copy.values())
    return {name: float(each[0]) for name, each in copy.items()}


def places(copy: Copy) -> dict[str, int]:
    return {name: each.data_ptr() for name, each in copy.items()}


def test_the_next_copy_has_the_memory_of_the_last_one_which_is_pinned_once():
    pinned: list[int] = []
    staging = Staging(lambda each: pinned.append(each.data_ptr()))
    first = staging.copy(state(1.0))
    where = places(first)
    assert pinned == [where["model.w"]]  # a small tensor is not worth it
    staging.end_copy(first)
    second = staging.copy(state(2.0))
    assert (places(second), values(second)) == (where, {"model.w": 2.0, "model.b": 2.0})
    staging.end_copy(second)
    assert places(staging.copy(state(3.0))) == where
    assert len(pinned) == 1


def test_a_copy_that_is_still_written_is_not_overwritten():
    staging = Staging(lambda each: None)
    first = staging.copy(state(1.0))
    second = staging.copy(state(2.0))
    assert not set(places(first).values()) & set(places(second).values())
    staging.end_copy(second)  # not the kept one
    third = staging.copy(state(3.0))
    assert [values(each)["model.w"] for each in (first, second, third)] == [1.0, 2.0, 3.0]
    staging.end_copy(first)
    assert places(staging.copy(state(4.0))) == places(first)


def test_a_state_with_other_tensors_gets_other_memory():
    pinned: list[int] = []
    staging = Staging(lambda each: pinned.append(each.data_ptr()))
    staging.end_copy(staging.copy(state(1.0)))
    with_moments = staging.copy(state(2.0, more=True))
    assert values(with_moments) == {"model.w": 2.0, "model.b": 2.0, "optimizer.w": -2.0}
    assert len(pinned) == 3
    staging.end_copy(with_moments)
    assert places(staging.copy(state(3.0, more=True))) == places(with_moments)


def test_memory_is_kept_though_it_cannot_be_pinned():
    def refuse(each: Tensor) -> None:
        raise OutOfMemory("it cannot be pinned")

    staging = Staging(refuse)
    first = staging.copy(state(1.0))
    staging.end_copy(first)
    assert places(staging.copy(state(2.0))) == places(first)


@pytest.mark.parametrize("written", [False, True])
def test_a_sleeping_trainer_keeps_no_copy_but_one_that_is_still_written(written):
    staging = Staging(lambda each: None)
    copy = staging.copy(state(1.0))
    if written:
        staging.end_copy(copy)
    staging.free()
    assert staging._stager is None
    assert values(copy)["model.w"] == 1.0
    staging.end_copy(copy)
    assert values(staging.copy(state(2.0)))["model.w"] == 2.0
    assert values(copy)["model.w"] == 1.0


def test_on_a_cpu_nothing_is_kept():
    staging = staging_of("cpu")
    first, second = staging.copy(state(1.0)), staging.copy(state(2.0))
    assert staging._stager is None and staging._read is None
    assert not set(places(first).values()) & set(places(second).values())


def test_a_trainer_frees_the_copies_of_its_runs_before_it_sleeps(model, monkeypatch):
    freed: list[Snapshots] = []
    monkeypatch.setattr(Snapshots, "free", lambda snapshots: freed.append(snapshots))
    runs = host(model, "a", "b")
    runs.switching.sleep(common_pb2.SleepRequest())
    assert freed == [runs.operations_of(name).snapshots for name in ("a", "b")]
