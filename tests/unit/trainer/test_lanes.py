"""Two halves of a batch side by side give what one after the other gives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tandem.settings import TrainerSettings
from tandem.wire.v1 import tinker_pb2 as wire
from tests.support.losses.batches import REQUESTS, mixed_request
from tests.support.tiny_model import VOCABULARY, write_tiny_model
from tests.support.trainer_worker import datum, request
from trainer_service.backends import World, backend_named
from trainer_service.batch import parse
from trainer_service.control import Control
from trainer_service.lanes import Lanes, added
from trainer_service.losses import LOSSES
from trainer_service.rank_trainer import Computed, RankTrainer
from trainer_service.validate import Limits, validate


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("lanes"), architecture="qwen3")


def make_trainer(path: Path, *, lanes: Lanes | None) -> RankTrainer:
    backend = backend_named("fsdp2")(
        model_path=path,
        settings=TrainerSettings(device="cpu"),
        world=World(rank=0, size=1, device="cpu"),
    )
    return RankTrainer(
        backend=backend,
        control=Control(rank=0, size=1, group=None),
        micro_batch_tokens=32,  # several micro-batches a lane
        model_path=path,
        lanes=lanes,
    )


def forward_backward(trainer: RankTrainer, data: list[wire.Datum], **more: bool) -> Computed:
    return compute(trainer, request(data, "importance_sampling", **more))


def compute(trainer: RankTrainer, message: wire.ForwardBackwardRequest) -> Computed:
    facts = trainer.backend.facts
    limits = Limits(vocabulary=facts.vocabulary, max_length=facts.max_length)
    computed = trainer.forward_backward(
        validate(parse(message.SerializeToString()), losses=LOSSES, limits=limits)
    )
    assert computed is not None
    return computed


def held(trainer: RankTrainer) -> dict[str, torch.Tensor]:
    model = trainer.backend._model
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def data_of(lengths: list[int]) -> list[wire.Datum]:
    return [
        datum(
            [(7 * row + place) % VOCABULARY for place in range(length)],
            logprobs=[-4.0 - 0.1 * place for place in range(length)],
            advantages=[(-1.0) ** row] * length,
        )
        for row, length in enumerate(lengths)
    ]


def test_two_lanes_give_the_loss_logprobs_and_gradients_of_one(model: Path) -> None:
    data = data_of([5, 9, 2, 14, 7, 7, 1, 11])
    alone, lanes = (
        make_trainer(model, lanes=None),
        make_trainer(model, lanes=Lanes(count=2, threads=1)),
    )
    expected, computed = forward_backward(alone, data), forward_backward(lanes, data)
    torch.testing.assert_close(computed.logprobs, expected.logprobs)
    assert computed.metrics == pytest.approx(expected.metrics)
    torch.testing.assert_close(held(lanes), held(alone), rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def alone_and_lanes(model: Path) -> tuple[RankTrainer, RankTrainer]:
    return make_trainer(model, lanes=None), make_trainer(model, lanes=Lanes(count=2, threads=1))


@pytest.mark.parametrize("name", REQUESTS)
def test_every_loss_is_the_same_in_two_lanes(
    alone_and_lanes: tuple[RankTrainer, RankTrainer], name: str
) -> None:
    alone, lanes = alone_and_lanes
    alone.drop_gradients()
    lanes.drop_gradients()
    expected, computed = compute(alone, mixed_request(name)), compute(lanes, mixed_request(name))
    torch.testing.assert_close(computed.logprobs, expected.logprobs)
    assert computed.metrics == pytest.approx(expected.metrics, rel=1e-4, abs=1e-5)
    torch.testing.assert_close(held(lanes), held(alone), rtol=1e-3, atol=1e-4)


def test_lanes_accumulate_over_calls_to_the_same_bits_every_time(model: Path) -> None:
    def twice() -> dict[str, torch.Tensor]:
        trainer = make_trainer(model, lanes=Lanes(count=2, threads=1))
        forward_backward(trainer, data_of([5, 9, 2, 14]))
        forward_backward(trainer, data_of([3, 8, 8]))
        return held(trainer)

    torch.testing.assert_close(twice(), twice(), rtol=0, atol=0)


def test_a_batch_smaller_than_the_lanes_is_computed(model: Path) -> None:
    trainer = make_trainer(model, lanes=Lanes(count=2, threads=1))
    assert len(forward_backward(trainer, data_of([4])).logprobs) == 4


def test_forward_only_leaves_no_gradients(model: Path) -> None:
    trainer = make_trainer(model, lanes=Lanes(count=2, threads=1))
    forward_backward(trainer, data_of([4, 6, 3]), forward_only=True)
    assert held(trainer) == {}


def test_an_error_in_a_lane_is_raised_when_all_have_ended() -> None:
    ended = []

    def fail() -> None:
        raise MemoryError("too much")

    with pytest.raises(MemoryError, match="too much"):
        Lanes(count=2, threads=1).map([fail, lambda: ended.append(True)])
    assert ended == [True]


def test_a_parameter_that_only_one_lane_used_keeps_its_gradient() -> None:
    one = torch.ones(2)
    total = added([None, one.clone(), None], [one.clone(), one.clone(), None])
    assert [None if t is None else t.tolist() for t in total] == [[1, 1], [2, 2], None]
