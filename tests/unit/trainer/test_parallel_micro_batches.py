from __future__ import annotations

from pathlib import Path
from threading import Thread

import pytest
import torch

from tandem.wire.v1 import tinker_pb2 as wire
from tests.support.local_trainer import batch_of, compute, gradients, make_rank
from tests.support.losses.batches import REQUESTS, mixed_request
from tests.support.tiny_model import VOCABULARY
from tests.support.trainer_worker import datum, request
from trainer_service.backends.base import add_gradients
from trainer_service.batches.micro_batches import MicroBatch
from trainer_service.compute.parallel import ParallelMicroBatches
from trainer_service.compute.trainer import BatchResult, RankTrainer
from trainer_service.models.activation_checkpointing import Checkpointing


def one_rank(path: Path, *, parallel: int = 0) -> RankTrainer:
    """A rank with several micro-batches for each thread."""
    return make_rank(path, parallel=parallel, micro_batch_tokens=32)


def forward_backward(trainer: RankTrainer, data: list[wire.Datum], **more: bool) -> BatchResult:
    return compute(trainer, request(data, "importance_sampling", **more))


def data_of(lengths: list[int]) -> list[wire.Datum]:
    return [
        datum(
            [(7 * row + place) % VOCABULARY for place in range(length)],
            logprobs=[-4.0 - 0.1 * place for place in range(length)],
            advantages=[(-1.0) ** row] * length,
        )
        for row, length in enumerate(lengths)
    ]


@pytest.fixture(scope="module")
def alone_and_parallel(model: Path) -> tuple[RankTrainer, RankTrainer]:
    return one_rank(model), one_rank(model, parallel=2)


@pytest.mark.parametrize("name", REQUESTS)
def test_every_loss_is_the_same_in_two_threads(
    alone_and_parallel: tuple[RankTrainer, RankTrainer], name: str
) -> None:
    alone, parallel = alone_and_parallel
    alone.drop_gradients()
    parallel.drop_gradients()
    expected, computed = compute(alone, mixed_request(name)), compute(parallel, mixed_request(name))
    torch.testing.assert_close(computed.logprobs, expected.logprobs)
    assert computed.metrics == pytest.approx(expected.metrics, rel=1e-4, abs=1e-5)
    torch.testing.assert_close(gradients(parallel), gradients(alone), rtol=1e-3, atol=1e-4)


def test_threads_accumulate_over_calls_to_the_same_bits_every_time(model: Path) -> None:
    def twice() -> dict[str, torch.Tensor]:
        trainer = one_rank(model, parallel=2)
        forward_backward(trainer, data_of([5, 9, 2, 14]))
        forward_backward(trainer, data_of([3, 8, 8]))
        return gradients(trainer)

    torch.testing.assert_close(twice(), twice(), rtol=0, atol=0)


def test_a_batch_with_fewer_datums_than_threads_is_computed(model: Path) -> None:
    trainer = one_rank(model, parallel=2)
    assert len(forward_backward(trainer, data_of([4])).logprobs) == 4


def test_no_share_is_smaller_than_is_worth_a_thread() -> None:
    threads = ParallelMicroBatches(count=3, threads=1, least_tokens=512)
    assert [threads.shares(tokens) for tokens in (1, 1023, 1024, 1536, 10**6)] == [1, 1, 2, 3, 3]


def test_a_small_batch_is_computed_as_without_threads(model: Path) -> None:
    alone, small = make_rank(model), make_rank(model, parallel=2, least_tokens=512)
    data = data_of([5, 9, 4])
    expected, computed = forward_backward(alone, data), forward_backward(small, data)
    assert computed.logprobs.tolist() == expected.logprobs.tolist()
    torch.testing.assert_close(gradients(small), gradients(alone), rtol=0, atol=0)


def test_forward_only_leaves_no_gradients(model: Path) -> None:
    trainer = one_rank(model, parallel=2)
    forward_backward(trainer, data_of([4, 6, 3]), forward_only=True)
    assert gradients(trainer) == {}


def test_an_error_in_one_thread_is_raised_when_all_have_ended(model: Path, monkeypatch) -> None:
    trainer, ended = make_rank(model), []
    batch = batch_of(trainer, request(data_of([5, 9]), "importance_sampling"))
    loss_of = trainer.backend.loss_of

    def fails_for_the_first(micro_batch: MicroBatch, *args: object, **more: object) -> object:
        if micro_batch.tokens.size == 5:
            raise ValueError("five are too few")
        return loss_of(micro_batch, *args, **more)

    monkeypatch.setattr(trainer.backend, "loss_of", fails_for_the_first)
    threads = ParallelMicroBatches(count=2, threads=1)
    with pytest.raises(ValueError, match="five are too few"):
        threads.compute(trainer.backend, batch, [((0,),), ((1,),)], done=ended.append)
    assert ended == [9]


def test_a_thread_with_a_short_sequence_leaves_the_blocks_of_a_long_one_checkpointed() -> None:
    class Block(torch.nn.Linear):
        computed = 0

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            self.computed += 1
            return super().forward(rows)

    block = Block(2, 2)
    checkpointing = Checkpointing([block])
    checkpointing.on = True
    other = Thread(target=setattr, args=(checkpointing, "on", False))
    other.start()
    other.join()
    block(torch.ones(1, 2)).sum().backward()
    assert block.computed == 2


def test_a_parameter_that_only_one_thread_used_keeps_its_gradient() -> None:
    one = torch.ones(2)
    total = add_gradients([None, one.clone(), None], [one.clone(), one.clone(), None])
    assert [None if t is None else t.tolist() for t in total] == [[1, 1], [2, 2], None]
