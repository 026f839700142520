from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tandem.v1 import trainer_pb2
from tests.support.local_trainer import (
    data_of,
    forward_backward,
    load,
    logprobs,
    make,
    model_of,
    publish,
    save,
    train,
    weights,
)
from trainer_service.optimizers import AdamWSettings, local
from trainer_service.optimizers.adamw import Moments
from trainer_service.optimizers.staged import Positions, StagedMoments, random_bits, round_

SETTINGS = AdamWSettings(
    learning_rate=0.02, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, grad_clip_norm=0.0
)
SIZES = (1000, 37, 5, 4096)


def some(dtype: torch.dtype) -> dict[str, nn.Parameter]:
    made = torch.Generator().manual_seed(1)
    return {
        f"p{number}": nn.Parameter(torch.randn(size, generator=made).to(dtype))
        for number, size in enumerate(SIZES)
    }


def give_gradients(parameters: dict[str, nn.Parameter], step: int) -> None:
    made = torch.Generator().manual_seed(step)
    for parameter in parameters.values():
        parameter.grad = torch.randn(parameter.shape, generator=made).to(parameter.dtype)


def stepped(moments: Moments | StagedMoments, *steps: int) -> torch.Tensor:
    for step in steps:
        give_gradients(moments.parameters, step)
        moments.step(SETTINGS)
    return torch.cat([each.detach().float() for each in moments.parameters.values()])


# --- Rounding --------------------------------------------------------------------------------


def test_what_is_rounded_is_one_of_its_two_neighbours_and_right_in_the_mean():
    exact = torch.randn(20_000, generator=torch.Generator().manual_seed(0)) * 1e-3
    below = (exact.view(torch.int32) & -0x10000).view(torch.float32)  # towards zero
    above = (below.view(torch.int32) + 0x10000).view(torch.float32)
    times, total = 400, torch.zeros_like(exact)
    for key in range(times):
        rounded = exact.clone()
        round_(rounded, Positions(0), start=0, key=key * 7919)
        assert torch.all((rounded == below) | (rounded == above))
        total += rounded
    width = (above - below).abs()
    off = (total / times - exact) / width
    assert off.abs().max() < 6 * 0.5 / times**0.5  # six standard deviations of a coin
    assert off.mean().abs() < 6 * 0.5 / (times * len(exact)) ** 0.5


def test_what_bfloat16_can_say_stays_as_it_is():
    exact = torch.tensor([0.0, -0.0, 1.0, -1.5, 2.0**-130, 3e38, torch.inf]).bfloat16().float()
    rounded = exact.clone()
    round_(rounded, Positions(0), start=3, key=11)
    assert torch.equal(rounded, exact)


def test_random_bits_are_those_of_a_position_wherever_a_piece_begins():
    def bits(positions: Positions, start: int, end: int, *, key: int = 9) -> torch.Tensor:
        return random_bits(positions, start, end, key=key, device=torch.device("cpu"))

    first = 2**32 - 50
    whole = bits(Positions(first), 0, 100)
    parts = [bits(Positions(first), n, n + 25) for n in range(0, 100, 25)]
    assert torch.equal(torch.cat(parts), whole)
    parts = [bits(Positions(first + n), 0, 25) for n in range(0, 100, 25)]
    assert torch.equal(torch.cat(parts), whole)
    columns = Positions(first + 3, width=7, stride=10)  # 3 to 9 of a matrix with ten columns
    parts = [bits(columns, 0, 33), bits(columns, 33, 70)]
    assert torch.equal(torch.cat(parts).view(10, 7), whole.view(10, 10)[:, 3:])
    assert not torch.equal(whole, bits(Positions(first), 0, 100, key=10))


def test_random_bits_are_even_and_those_of_neighbours_have_nothing_to_do_with_each_other():
    bits = random_bits(Positions(0), 0, 2**18, key=5, device=torch.device("cpu"))
    assert bits.min() >= 0
    for bit in range(16):
        assert ((bits >> bit) & 1).float().mean() == pytest.approx(0.5, abs=0.005)
    neighbours = torch.corrcoef(torch.stack([bits[1:], bits[:-1]]).float())
    assert abs(neighbours[0, 1]) < 0.01


# --- Steps -----------------------------------------------------------------------------------


@pytest.mark.parametrize("on_host", [False, True])
def test_pieces_in_float32_are_stepped_as_torch_steps_the_whole(on_host):
    expected = stepped(Moments(some(torch.float32)), 0, 1, 2)
    pieces = StagedMoments(some(torch.float32), on_host=on_host, piece=256)
    torch.testing.assert_close(stepped(pieces, 0, 1, 2), expected, rtol=1e-6, atol=1e-7)


def test_updates_too_small_for_bfloat16_add_up():
    """Rounded to nearest, a weight of one would stay one under steps of 2^-10."""
    one = nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))
    moments = StagedMoments({"one": one}, on_host=False)
    for _ in range(64):
        one.grad = torch.ones_like(one)
        moments.step(
            AdamWSettings(
                learning_rate=2**-10,
                beta1=0.9,
                beta2=0.95,
                eps=1e-8,
                weight_decay=0.0,
                grad_clip_norm=0.0,
            )
        )
    assert one.detach().float().mean() == pytest.approx(1 - 64 * 2**-10, abs=1e-3)


def test_states_that_were_saved_go_on_with_the_same_bits():
    ours = StagedMoments(some(torch.bfloat16), on_host=False)
    stepped(ours, 0, 1)
    theirs = StagedMoments(some(torch.bfloat16), on_host=False)
    for name, parameter in theirs.parameters.items():
        parameter.data.copy_(ours.parameters[name])
    saved, empty = ours.state(create=False), theirs.state(create=True)
    assert saved.keys() == empty.keys()
    for name, tensor in empty.items():
        tensor.copy_(saved[name])
    assert torch.equal(stepped(theirs, 2, 3), stepped(ours, 2, 3))


def test_another_step_draws_other_bits():
    first, second = (StagedMoments(some(torch.bfloat16), on_host=False) for _ in range(2))
    stepped(second, 0)
    for name, tensor in second.state(create=False).items():
        if not name.endswith(".step"):
            tensor.zero_()
    for name, parameter in second.parameters.items():
        parameter.data.copy_(first.parameters[name])
    assert not torch.equal(stepped(first, 5), stepped(second, 5))


def test_a_reset_forgets_all_steps():
    fresh, used = (StagedMoments(some(torch.bfloat16), on_host=True) for _ in range(2))
    stepped(used, 0, 1)
    used.reset()
    assert used.state(create=False) == {}
    for name, parameter in used.parameters.items():
        parameter.data.copy_(fresh.parameters[name])
    assert torch.equal(stepped(used, 2), stepped(fresh, 2))


# --- Trainers --------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_all_states_of_a_run_are_in_bfloat16_and_it_learns(model):
    operations = make(model, None, states="bfloat16")
    before = logprobs(operations, data_of(0)).mean()
    train(operations, 4)
    forward_backward(operations, data_of(0))
    named = model_of(operations).named_parameters()
    assert {each.dtype for _, each in named} == {torch.bfloat16}
    assert {each.grad.dtype for each in model_of(operations).parameters()} == {torch.bfloat16}
    state = operations.trainer.backend.optimizer.state(create=False)
    assert {t.dtype for n, t in state.items() if not n.endswith(".step")} == {torch.bfloat16}
    assert logprobs(operations, data_of(0)).mean() > before


def test_it_computes_what_a_run_with_float32_states_does_from_weights_that_bfloat16_can_say(
    model, tmp_path
):
    """The published weights equal the states exactly."""
    bfloat16 = make(model, None, states="bfloat16")
    train(bfloat16, 1)
    publish(bfloat16, tmp_path / "v1")
    float32 = make(tmp_path / "v1", None)
    ours, theirs = logprobs(bfloat16, data_of(3)), logprobs(float32, data_of(3))
    assert ours == pytest.approx(theirs, abs=1e-5)


def test_a_checkpoint_in_bfloat16_goes_on_bit_by_bit(model, tmp_path):
    alone, saved = (make(model, None, states="bfloat16") for _ in range(2))
    train(alone, 4)
    train(saved, 2)
    save(saved, tmp_path / "a")
    restored = make(model, None, states="bfloat16")
    assert not load(restored, tmp_path / "a").HasField("failure")
    train(restored, 2, seed=2)
    expected, found = weights(alone), weights(restored)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_so_does_a_snapshot(model, tmp_path):
    alone = make(model, None, states="bfloat16")
    train(alone, 2)
    path = str(tmp_path / "s")
    alone.take_snapshot(trainer_pb2.TakeSnapshotRequest(path=path))
    written = alone.snapshots.result(path).result(timeout=60)
    assert not written.HasField("failure"), written.failure
    restored = make(model, None, states="bfloat16")
    assert not restored.restore(trainer_pb2.RestoreRequest(path=path)).HasField("failure")
    train(alone, 2, seed=2)
    train(restored, 2, seed=2)
    expected, found = weights(alone), weights(restored)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("kinds", [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_a_checkpoint_of_other_states_is_converted(model, tmp_path: Path, kinds):
    theirs, ours = (make(model, None, states=kind) for kind in kinds)
    train(theirs, 2)
    save(theirs, tmp_path / "a")
    assert not load(ours, tmp_path / "a").HasField("failure")
    backends = [each.trainer.backend for each in (theirs, ours)]
    there, here = ({**b.parameters(), **b.optimizer.state(create=False)} for b in backends)
    assert there.keys() == here.keys()
    for name, tensor in here.items():
        found, expected = local(tensor).float(), local(there[name]).float()
        torch.testing.assert_close(found, expected, rtol=2**-8, atol=1e-30)
        if kinds[0] == "bfloat16":
            assert torch.equal(found, expected), name
