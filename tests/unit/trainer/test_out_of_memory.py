from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tandem.errors import OutOfMemory
from tandem.protocol.worker import TrainingSpec
from tandem.settings.workers import TrainerSettings
from tandem.v1 import trainer_pb2
from tandem.weights.layout import BaseModelFiles
from tandem.wire.v1 import tinker_pb2 as wire
from tests.support.local_trainer import (
    compute,
    data_of,
    gradients,
    load,
    optim_step,
    save,
    step,
)
from tests.support.small_memory import SmallMemory, Where
from tests.support.trainer_worker import datum, request
from trainer_service.backends import World
from trainer_service.batches.memory import MicroBatchTooLarge, ran_out_of_memory
from trainer_service.compute.control_group import ControlGroup, Op
from trainer_service.compute.parallel import ParallelMicroBatches
from trainer_service.compute.trainer import RankTrainer
from trainer_service.service.operations import Follower, Operations

WAYS = ("plain", "parallel", "copied", "sharded", "on the host")
PLACES: tuple[Where, ...] = ("forward", "head", "backward", "block")


def make(
    path: Path,
    way: str = "plain",
    *,
    most: int = 10**9,
    checkpointed: int = 0,
    where: Where = "forward",
    plan: int = 0,
    **settings: object,
) -> RankTrainer:
    """The only rank of a trainer with memory for micro-batches of `most` tokens."""
    backend = SmallMemory(
        model_path=path,
        settings=TrainerSettings(
            device="cpu",
            dtype="bfloat16" if way == "copied" else "float32",
            shard_group_parameters=1,
            **settings,
        ),
        world=World(rank=0, size=1, device="cpu"),
        training=TrainingSpec(
            states="bfloat16" if way == "sharded" else "float32",
            offload="weights" if way == "on the host" else "none",
        ),
        most=most,
        checkpointed=checkpointed,
        where=where,
    )
    return RankTrainer(
        backend=backend,
        control=ControlGroup(rank=0, size=1, group=None),
        micro_batch_tokens=plan,
        base=BaseModelFiles.of_run(path, backend.training),
        parallel=ParallelMicroBatches(count=2, threads=1) if way == "parallel" else None,
    )


def assert_same_gradients(one: RankTrainer, other: RankTrainer) -> None:
    found, expected = gradients(one), gradients(other)
    assert found.keys() == expected.keys() != set()
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name


def sequences(*lengths: int) -> list[wire.Datum]:
    return [
        datum([5 + place for place in range(length)], weights=[1.0] * length) for length in lengths
    ]


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("way", WAYS)
def test_the_result_is_that_of_the_smaller_plan_from_the_beginning(model, group, way, where):
    small = make(model, way, most=20, where=where)
    message = request(data_of(count=9))
    found = compute(small, message)
    assert small.backend.failed > 0
    assert found.plan <= 20
    expected_of = make(model, way, plan=found.plan)
    expected = compute(expected_of, message)
    assert np.array_equal(found.logprobs, expected.logprobs)
    assert found.metrics == expected.metrics
    assert_same_gradients(small, expected_of)


@pytest.mark.parametrize("where", PLACES)
def test_the_same_size_is_tried_once_more_where_memory_has_come_free(
    model, group, monkeypatch, where
):
    """As when a neighbour on the device has ended."""
    small = make(model, most=20, where=where)
    backend = small.backend

    def free(device: str) -> int:
        backend.most = 10**9
        return 1

    monkeypatch.setattr("trainer_service.backends.loop.free_on", lambda device: 0)
    monkeypatch.setattr("trainer_service.compute.trainer.free_on", free)
    plan = small.micro_batch_tokens
    message = request(data_of(count=9))
    found = compute(small, message)
    assert (backend.failed, found.plan, small.micro_batch_tokens) == (1, plan, plan)
    expected_of = make(model, plan=plan)
    assert np.array_equal(found.logprobs, compute(expected_of, message).logprobs)
    assert_same_gradients(small, expected_of)


@pytest.mark.parametrize(("grown", "failures"), [(True, 2), (False, 1)])
def test_the_same_size_is_tried_no_third_time(model, group, monkeypatch, grown, failures):
    small = make(model, most=20)
    lengths = sequences(*[8] * 4)
    monkeypatch.setattr("trainer_service.backends.loop.free_on", lambda device: 0)
    monkeypatch.setattr("trainer_service.compute.trainer.free_on", lambda device: int(grown))
    found = compute(small, request(lengths))
    assert small.backend.failed == failures
    assert found.plan == small.micro_batch_tokens == 16


@pytest.mark.parametrize(
    ("way", "where"),
    [
        *((way, where) for way in WAYS for where in ("forward", "head")),
        ("parallel", "backward"),
        ("parallel", "block"),
    ],
)
def test_gradients_of_earlier_batches_stay_as_they_were(model, group, way, where):
    small = make(model, way, most=20, where=where)
    early, late = request(sequences(4, 5)), request(data_of(count=9))
    compute(small, early)
    plan = compute(small, late).plan
    expected = make(model, way, plan=plan)
    compute(expected, early)
    compute(expected, late)
    assert small.backend.failed > 0
    assert_same_gradients(small, expected)


@pytest.mark.parametrize("where", ["backward", "block"])
@pytest.mark.parametrize("way", ["plain", "copied", "sharded", "on the host"])
def test_a_rank_ends_that_has_added_to_gradients_of_earlier_batches(model, group, way, where):
    small = make(model, way, most=20, where=where)
    compute(small, request(sequences(4, 5)))
    with pytest.raises(MicroBatchTooLarge, match="ran out of memory: CUDA") as caught:
        compute(small, request(data_of(count=9)))
    assert caught.value.tokens > 20


def test_a_rank_ends_whose_backend_cannot_undo(model, monkeypatch):
    small = make(model, most=20)
    monkeypatch.setattr(type(small.backend), "mark", lambda self: None)
    with pytest.raises(MicroBatchTooLarge):
        compute(small, request(data_of(count=9)))
    assert small.backend.failed == 1


@pytest.mark.parametrize("way", WAYS)
def test_a_forward_pass_is_divided_too(model, group, way):
    small = make(model, way, most=20)
    message = request(data_of(count=9), forward_only=True)
    found = compute(small, message)
    assert np.array_equal(
        found.logprobs, compute(make(model, way, plan=found.plan), message).logprobs
    )
    assert gradients(small) == {}


def test_the_smaller_plan_is_kept(model):
    small = make(model, most=20)
    first = compute(small, request(data_of(count=9)))
    failed = small.backend.failed
    assert compute(small, request(data_of(1, count=9))).plan == first.plan
    assert small.backend.failed == failed


def send(
    operations: Operations, data: Sequence[wire.Datum], **fields: int
) -> trainer_pb2.ForwardBackwardReply:
    payload = request(data).SerializeToString()
    return operations.forward_backward(
        trainer_pb2.ForwardBackwardRequest(payload=payload, **fields)
    )


def test_a_sequence_that_is_too_long_is_refused_in_numbers_and_the_run_lives(model):
    trainer = make(model, most=10)
    operations, expected = Operations(trainer), make(model, plan=2048)
    assert not send(operations, sequences(4, 5)).HasField("failure")
    compute(expected, request(sequences(4, 5)))
    reply = send(operations, sequences(3, 12))
    assert reply.failure.type == "out_of_memory"
    assert reply.failure.message.startswith(
        "a micro-batch of 12 tokens ran out of memory and cannot be divided: CUDA out of memory"
    )
    assert reply.out_of_memory_at == 12
    assert_same_gradients(trainer, expected)
    assert operations.describe().micro_batch_tokens == 2048, "shorter ones may be many"
    refused = optim_step(operations)
    assert refused.failure.type == "gradients_incomplete"
    assert not send(operations, sequences(4, 5)).HasField("failure")
    step(operations)
    assert trainer.step == 1


@pytest.mark.parametrize("where", ["forward", "block"])
@pytest.mark.parametrize("way", WAYS)
def test_an_undividable_sequence_is_computed_with_checkpointed_blocks(model, group, way, where):
    small, expected = make(model, way, most=10, checkpointed=20, where=where), make(model, way)
    message = request(sequences(12))
    found, wanted = compute(small, message), compute(expected, message)
    assert small.backend.failed == 1
    assert np.array_equal(found.logprobs, wanted.logprobs)
    assert_same_gradients(small, expected)
    compute(small, request(sequences(13)))
    assert small.backend.failed == 1
    compute(small, request(sequences(10)))
    assert not small.backend._checkpointing.on


def test_blocks_are_not_checkpointed_where_the_settings_forbid_it(model):
    small = make(model, most=10, checkpointed=20, checkpointing="off")
    with pytest.raises(OutOfMemory):
        compute(small, request(sequences(12)))
    assert small.backend.failed == 1


def test_pairs_are_not_divided(model):
    trainer = make(model, most=10)
    pairs = [
        datum([5] * length, weights=[1.0] * length, ref_logprobs=[-4.0] * length)
        for length in (4, 4, 6, 6)
    ]
    with pytest.raises(OutOfMemory, match="a micro-batch of 12 tokens ran out"):
        compute(trainer, request(pairs, "dpo"))


def test_the_reply_says_the_plan_and_a_replay_with_it_gives_the_same_bits(model):
    small, again = make(model, most=20), make(model)
    reply = send(Operations(small), data_of(count=9))
    assert 0 < reply.micro_batch_tokens <= 20
    repeated = send(
        Operations(again), data_of(count=9), micro_batch_tokens=reply.micro_batch_tokens
    )
    assert repeated.output == reply.output
    assert repeated.micro_batch_tokens == reply.micro_batch_tokens
    assert_same_gradients(small, again)


def test_a_call_that_ended_a_trainer_is_computed_in_smaller_micro_batches_or_refused(model):
    trainer = make(model)
    operations = Operations(trainer)
    reply = send(operations, sequences(8, 8, 8, 8), out_of_memory_at=32)
    assert reply.micro_batch_tokens == 16
    assert operations.describe().micro_batch_tokens == 16
    before = trainer.progress
    reply = send(operations, sequences(8, 8), out_of_memory_at=8)
    assert (reply.failure.type, reply.out_of_memory_at) == ("out_of_memory", 8)
    assert before.read() == trainer.progress.read()


def test_all_ranks_checkpoint_the_blocks_of_a_call_that_ended_a_trainer(model):
    trainer, follower = make(model), make(model)
    operations = Operations(trainer)
    reply = send(operations, sequences(8, 8), out_of_memory_at=8, checkpoint=True)
    assert (reply.failure.type, reply.out_of_memory_at, reply.micro_batch_tokens) == ("", 8, 8)
    announced = trainer_pb2.ForwardBackwardRequest(
        payload=request(sequences(8, 8)).SerializeToString(),
        micro_batch_tokens=8,
        out_of_memory_at=8,
        checkpoint=True,
    )
    other = Follower(follower, thread=operations.snapshots._thread)
    other.apply(Op.FORWARD_BACKWARD, announced.SerializeToString())
    for rank in (trainer, follower):
        assert [rank.backend.plan.checkpoints(tokens) for tokens in (7, 8)] == [False, True]
    assert_same_gradients(trainer, follower)


@pytest.mark.parametrize(("own", "plan"), [(2048, 512), (256, 256)])
def test_a_trainer_that_is_restored_goes_on_with_the_smaller_plan(model, tmp_path, own, plan):
    lost, restored = Operations(make(model, plan=512)), Operations(make(model, plan=own))
    send(lost, sequences(4, 5))
    step(lost)
    path = tmp_path / "snapshot"
    save(lost, path)
    restored.restore(trainer_pb2.RestoreRequest(path=str(path)))
    assert restored.describe().micro_batch_tokens == plan


def test_a_checkpoint_that_is_loaded_says_nothing_of_the_memory_here(model, tmp_path):
    saved, loading = Operations(make(model, plan=512)), Operations(make(model))
    save(saved, tmp_path / "checkpoint")
    assert not load(loading, tmp_path / "checkpoint", optimizer=False).HasField("failure")
    assert loading.describe().micro_batch_tokens == 2048


def too_much(allocate) -> Exception:
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        allocate()
    return caught.value


def test_what_says_that_memory_ran_out_is_told_from_other_errors():
    assert ran_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
    assert ran_out_of_memory(too_much(lambda: torch.empty(2**50, dtype=torch.uint8)))
    assert ran_out_of_memory(too_much(lambda: np.empty(2**50, np.uint8)))
    assert ran_out_of_memory(RuntimeError("CUDA error: out of memory"))
    assert not ran_out_of_memory(too_much(lambda: torch.ones(2) @ torch.ones(3)))
    assert not ran_out_of_memory(ValueError("out of memory"))


def test_any_other_error_is_not_tried_again(model, monkeypatch):
    trainer, calls = make(model), SimpleNamespace(count=0)

    def fail(*_: object, **__: object) -> None:
        calls.count += 1
        raise RuntimeError("a defect")

    monkeypatch.setattr(trainer.backend, "logprobs", fail)
    with pytest.raises(RuntimeError, match="a defect"):
        compute(trainer, request(sequences(4)))
    assert calls.count == 1
